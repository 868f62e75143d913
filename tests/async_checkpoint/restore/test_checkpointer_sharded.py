"""Sharded state, saved by N ranks and loaded by M."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from procs import Job

Ranks = Callable[..., Job]


def runs(ranks: Ranks, scenario: str, path: Path, nprocs: int) -> None:
    with ranks("sharded", scenario, str(path), nprocs=nprocs) as job:
        job.start_all()
        codes = job.wait_all()
        assert set(codes.values()) == {0}, "\n".join(map(job.errors, range(nprocs)))


def test_saved_on_four_loaded_on_fewer(ranks: Ranks, tmp_path: Path) -> None:
    runs(ranks, "saves", tmp_path, 4)
    for nprocs in (1, 2, 3):
        runs(ranks, "loads", tmp_path, nprocs)


def test_saved_on_one_loaded_on_four(ranks: Ranks, tmp_path: Path) -> None:
    runs(ranks, "saves", tmp_path, 1)
    runs(ranks, "loads", tmp_path, 4)


def test_shardedtensors(ranks: Ranks, tmp_path: Path) -> None:
    runs(ranks, "sharded_tensor", tmp_path, 2)


def test_ranks_that_change_places_in_their_processes(ranks: Ranks, tmp_path: Path) -> None:
    runs(ranks, "ranks_change_places", tmp_path, 3)
