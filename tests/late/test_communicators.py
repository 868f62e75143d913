"""What NCCL does when a communicator is made, aborted or destroyed, and a rank fails meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from procs import Job

Ranks = Callable[..., Job]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("scenario", "nccl", "nprocs"),
    [
        ("before_the_first_collective", "bootstrap", 2),
        ("before_the_first_collective", "bootstrap", 4),
        ("before_the_first_collective", "bootstrap nonblocking", 3),
        ("before_the_first_collective", "bootstrap split", 3),
        ("in_a_second_group", "bootstrap", 3),
        ("after_the_abort", "bootstrap", 2),
        ("destroyed_in_a_finally", "destroy", 2),
        ("a_captured_graph", "", 2),
    ],
)
def test_the_ranks_restart_in_place(
    ranks: Ranks, tmp_path: Path, scenario: str, nccl: str, nprocs: int
) -> None:
    env = {"LATE_NCCL": nccl, "TORCH_NCCL_NONBLOCKING_TIMEOUT": "3"}
    with ranks("communicators", scenario, str(tmp_path / "f"), nprocs=nprocs, env=env) as job:
        job.start_all()
        codes = job.wait_all()
        errors = "\n".join(job.errors(rank) for rank in range(nprocs))
        assert codes == dict.fromkeys(range(nprocs), 0), errors
        assert "timeout" not in errors
        for rank in range(nprocs):
            events = [(line["event"], line["iteration"]) for line in job.lines(rank)]
            assert events == [("entered", 0), ("entered", 1), ("returned", 1)], errors


def test_a_rank_whose_abort_does_not_end_leaves_for_its_replacement(
    ranks: Ranks, tmp_path: Path
) -> None:
    with ranks("communicators", "an_abort_that_stays", str(tmp_path / "f")) as job:
        job.start_all()
        assert job.wait(0) == 1, job.errors(0)
        assert "the abort of a process group" in job.errors(0)
        job.start(0, env={"OUTLAST_REPLACEMENT": "1"})
        assert job.wait_all() == {0: 0, 1: 0}, job.errors(0) + job.errors(1)
