"""Pipeline stages: each has a model with its own name, and continues as replicas or shards do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.live_trainings import check_same, later, run
from procs import Job

Ranks = Callable[..., Job]
pytestmark = pytest.mark.slow


def test_a_killed_rank_of_a_replicated_stage_costs_no_step(ranks: Ranks, tmp_path: Path) -> None:
    reference = run(ranks, tmp_path / "reference", script="stages", nprocs=4)
    faults = later(3, 6, "forward 7", "SIGKILL", nprocs=4)
    faulty = run(ranks, tmp_path / "faulty", *faults, script="stages", nprocs=4)
    found = {**dict.fromkeys((0, 1, 2), (6, "live")), 3: (6, "replica")}
    assert faulty.restored() == found, faulty.errors
    check_same(faulty, reference)


@pytest.mark.parametrize(("do", "found"), [("raise", (6, "live")), ("SIGKILL", (4, "memory"))])
def test_a_stage_on_one_rank_continues_unless_that_rank_is_killed(
    ranks: Ranks, tmp_path: Path, do: str, found: tuple[int, str]
) -> None:
    reference = run(ranks, tmp_path / "reference", script="stages")
    faulty = run(ranks, tmp_path / "faulty", *later(1, 6, "forward 7", do), script="stages")
    assert faulty.restored() == {0: found, 1: found}, faulty.errors
    check_same(faulty, reference)
    if do == "raise":
        again = run(ranks, tmp_path / "faulty", script="stages", steps=13)
        assert again.restored(0) == dict.fromkeys((0, 1), (12, "storage")), again.errors


def test_a_last_state_that_lacks_a_stage_is_not_saved(ranks: Ranks, tmp_path: Path) -> None:
    faults = later(1, 6, "forward 7", "SIGKILL")
    with pytest.raises(AssertionError, match="lacks the shards of rank 1"):
        plan = {"script": "stages", "replace": False, "await": 1}
        run(ranks, tmp_path / "faulty", *faults, **plan)  # it ends with an error
