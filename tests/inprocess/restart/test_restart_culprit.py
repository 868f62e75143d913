"""R6 for hangs: the rank that hangs is named, not one that waits for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from inprocess.job_output import assert_never_together, errors, full, views
from outlast.events.report import build, load
from procs import Job

Ranks = Callable[..., Job]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    ["work", "collective", "receive"],
)
def test_the_culprit_of_a_hang_is_named_though_its_victims_time_out_first(
    ranks: Ranks, tmp_path: Path, how: str
) -> None:
    logs = tmp_path / "events"
    logs.mkdir()
    env = {"OUTLAST_EVENTS_DIR": str(logs)}
    with ranks("culprit", "one_hangs_and_others_time_out", how, nprocs=4, env=env) as job:
        job.start_all()
        assert job.wait_all() == dict.fromkeys(range(4), 0), errors(job)
        assert views(job) == {0: full(4), 1: full(4)}
        assert_never_together(job)
        for rank in range(4):  # only the rank that hung says it
            said = "restart of iteration 0: rank 2 on " in job.errors(rank)
            assert said == (rank == 2), errors(job)
        report = build(load(logs))
        assert report.hosts[0].lost.hang > 0
        (restart,) = report.restarts
        assert restart.cause is not None
        assert (restart.cause.rank, restart.cause.consequence) == (2, False)
        assert all(other.consequence for other in restart.others), restart.others
        assert restart.phases.detection is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "named", "said"),
    [
        (
            "behind",
            [2],
            [
                "recv < ",
                "; it has begun 1 of the collectives of the default group, and ranks 0, 3 wait in "
                "number 2, all_reduce of float32 [3, 4] at culprit.py:",
                "; it has begun 0 of the collectives of group 'tp', and rank 1 waits in number 1, "
                "all_reduce of float32 [3, 4] at culprit.py:",
            ],
        ),
        pytest.param(
            "mixed",
            [0, 1, 2, 3],
            [
                "; collective 2 of the default group is ",
                "broadcast of float32 [3, 4] at culprit.py:",
                " in one_is_behind on ranks 0, 1, 3",
                " in one_is_behind on rank 2",
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"),
    reason="this torch has no flight recorder for gloo",
)
def test_ranks_that_all_wait_in_torch(
    ranks: Ranks, how: str, named: list[int], said: list[str]
) -> None:
    """Their collectives tell which one the others wait for, or that they differ."""
    with ranks("culprit", "one_is_behind", how, nprocs=4) as job:
        job.start_all()
        assert job.wait_all() == dict.fromkeys(range(4), 0), errors(job)
        texts = {rank: job.errors(rank) for rank in range(4)}
    (found,) = [rank for rank, text in texts.items() if f"iteration 0: rank {rank} on " in text]
    assert found in named, texts
    for words in said:
        assert words in texts[found], texts
