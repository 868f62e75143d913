"""Sharded models: after an exception each rank has its part; after a kill, a replica of it may."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.live_trainings import check_same, later, run
from procs import Job

Ranks = Callable[..., Job]


@pytest.mark.slow
def test_an_exception_costs_no_step_with_fsdp(ranks: Ranks, tmp_path: Path) -> None:
    reference = run(ranks, tmp_path / "r", kind="fsdp")
    faulty = run(ranks, tmp_path / "c", *later(1, 6, "forward 7", "raise"), kind="fsdp")
    assert faulty.restored() == {0: (6, "live"), 1: (6, "live")}
    check_same(faulty, reference)
    killed = run(ranks, tmp_path / "k", *later(1, 6, "forward 7", "SIGKILL"), kind="fsdp")
    assert {step for step, _ in killed.restored().values()} == {4}
    check_same(killed, reference)


@pytest.mark.slow
def test_a_killed_rank_gets_its_part_from_a_replica_with_hsdp(ranks: Ranks, tmp_path: Path) -> None:
    reference = run(ranks, tmp_path / "r", kind="hsdp", nprocs=4)
    faults = later(1, 6, "forward 7", "SIGKILL", nprocs=4)
    faulty = run(ranks, tmp_path / "c", *faults, kind="hsdp", nprocs=4)
    assert faulty.restored() == {
        **dict.fromkeys((0, 2, 3), (6, "live")),
        1: (6, "replica"),
    }
    check_same(faulty, reference)
