"""Three DDP ranks and more, and augmentation in workers: a fault changes no bit of a batch, of a
loss, or of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.live_trainings import check_same, later, run
from procs import Job

Ranks = Callable[..., Job]
SMALL_BUCKETS = {"bucket_cap_mb": 0.01}
PLANS: dict[str, dict[str, Any]] = {
    "three ranks": {"nprocs": 3},
    "four ranks": {"nprocs": 4, "ddp": SMALL_BUCKETS, "data": "persistent"},
    "wrapped late": {"nprocs": 3, "ddp": SMALL_BUCKETS, "data": "elastic", "late": True},
    "views": {"nprocs": 3, "ddp": {**SMALL_BUCKETS, "gradient_as_bucket_view": True}},
    "static graph": {"nprocs": 3, "ddp": {**SMALL_BUCKETS, "static_graph": True}},
    "hook": {"nprocs": 3, "ddp": SMALL_BUCKETS, "hook": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(plan, id=name, marks=pytest.mark.exhaustive if number % 2 else ())
        for number, (name, plan) in enumerate(PLANS.items())
    ],
)
def test_ranks_and_workers_continue_with_the_same_bits(
    ranks: Ranks, tmp_path: Path, plan: dict[str, Any]
) -> None:
    """An exception after the first step, one within an epoch, and a kill."""
    nprocs = plan["nprocs"]
    reference = run(ranks, tmp_path / "reference", script="same_bits", **plan)
    faults = [
        *later(1, 1, "forward 2", "raise", nprocs, iteration=0),
        *later(2, 3, "forward 4", "raise another", nprocs, iteration=1),
        *later(1, 8, "forward 9", "SIGKILL", nprocs, iteration=2),
    ]
    faulty = run(ranks, tmp_path / "faulty", *faults, script="same_bits", **plan)
    found = [set(faulty.restored(iteration).values()) for iteration in (1, 2, 3)]
    assert found == [{(1, "live")}, {(3, "live")}, {(8, "live"), (8, "replica")}], faulty.errors
    check_same(faulty, reference)


@pytest.mark.slow
def test_a_checkpoint_has_the_order_too(ranks: Ranks, tmp_path: Path) -> None:
    plan: dict[str, Any] = {"nprocs": 3, "ddp": SMALL_BUCKETS, "job": {"live": False}}
    reference = run(ranks, tmp_path / "reference", script="same_bits", **plan)
    faults = later(1, 5, "forward 6", "raise", 3)
    faulty = run(ranks, tmp_path / "faulty", *faults, script="same_bits", **plan)
    assert {step for step, _ in faulty.restored().values()} == {4}
    check_same(faulty, reference)
