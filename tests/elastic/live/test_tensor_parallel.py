"""Tensor parallelism with replicas of each part: a part that a living rank has comes from there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.live_trainings import check_same, fault, later, run
from procs import Job

Ranks = Callable[..., Job]
LIVE = dict.fromkeys(range(4), "live")
pytestmark = pytest.mark.slow


def test_no_step_is_made_again_where_a_replica_of_each_part_is_left(
    ranks: Ranks, tmp_path: Path
) -> None:
    """An exception, and a kill between two steps. If one comes before the exchange of the gradients
    of one part, when the replicas of the other part have completed theirs, a checkpoint is loaded.
    """
    reference = run(ranks, tmp_path / "reference", script="tensor_parallel", nprocs=4)
    computed = [fault(other, "exchanged 9", f"mark x{other}", iteration=2) for other in (0, 2)]
    faults = [
        *later(2, 5, "forward 6", "raise", nprocs=4, iteration=0),
        *later(3, 6, "forward 7", "SIGKILL", nprocs=4, iteration=1),
        *computed,
        fault(1, "computed 9", "await x0, await x2, SIGKILL", iteration=2),
    ]
    faulty = run(ranks, tmp_path / "faulty", *faults, script="tensor_parallel", nprocs=4)
    found = [faulty.restored(iteration) for iteration in (1, 2, 3)]
    for step, lost, each in zip((5, 6), (None, 3), found[:2], strict=True):
        sources = LIVE if lost is None else {**LIVE, lost: "replica"}
        assert each == {rank: (step, source) for rank, source in sources.items()}, faulty.errors
    assert {step for step, _ in found[2].values()} in ({4}, {8}), faulty.errors
    check_same(faulty, reference)


def test_the_last_state_has_the_parts_of_which_a_replica_is_left(
    ranks: Ranks, tmp_path: Path
) -> None:
    plan: dict[str, Any] = {"script": "tensor_parallel", "nprocs": 4}
    faults = later(3, 6, "forward 7", "SIGKILL", nprocs=4)
    with pytest.raises(AssertionError, match="step 6, the newest one that the ranks had, is saved"):
        run(ranks, tmp_path / "c", *faults, **plan, **{"await": False}, replace=False)
    again = run(ranks, tmp_path / "c", **plan)
    assert again.restored(0) == dict.fromkeys(range(4), (6, "storage")), again.errors
