"""Sharded state, saved by N ranks and loaded by M."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from procs import Job

Ranks = Callable[..., Job]


def runs(ranks: Ranks, scenario: str, path: Path, nprocs: int) -> None:
    with ranks("sharded", scenario, str(path), nprocs=nprocs) as job:
        job.start_all()
        codes = job.wait_all()
        assert set(codes.values()) == {0}, "\n".join(map(job.errors, range(nprocs)))


@pytest.mark.slow
def test_saved_on_four_loaded_on_fewer(ranks: Ranks, tmp_path: Path) -> None:
    runs(ranks, "saves", tmp_path, 4)
    for nprocs in (1, 2, 3):
        runs(ranks, "loads", tmp_path, nprocs)


@pytest.mark.slow
def test_saved_on_one_loaded_on_four(ranks: Ranks, tmp_path: Path) -> None:
    runs(ranks, "saves", tmp_path, 1)
    runs(ranks, "loads", tmp_path, 4)


def test_shardedtensors(ranks: Ranks, tmp_path: Path) -> None:
    runs(ranks, "sharded_tensor", tmp_path, 2)


def trained(ranks: Ranks, path: Path) -> tuple[list[dict[int, str]], list[list[str]]]:
    with ranks("sharded", "fsdp_trains", str(path), "6") as job:
        job.start_all()
        codes = job.wait_all()
        assert set(codes.values()) == {0}, job.errors(0) + job.errors(1)
        lines = [job.lines(rank) for rank in range(2)]
    losses = [{x["step"]: x["loss"] for x in own if x["event"] == "trained"} for own in lines]
    refused = [[x["message"] for x in own if x["event"] == "raised"] for own in lines]
    return losses, refused


@pytest.mark.fsdp2
def test_an_fsdp2_model_continues_bit_identically(ranks: Ranks, tmp_path: Path) -> None:
    """By the recipe of the guide; the state dict of a new optimizer is refused."""
    undisturbed, _ = trained(ranks, tmp_path)
    continued, refused = trained(ranks, tmp_path)
    for rank in range(2):
        assert list(undisturbed[rank]) == [0, 1, 2, 3, 4, 5]
        assert continued[rank] == {step: undisturbed[rank][step] for step in (3, 4, 5)}
        assert len(refused[rank]) == 2
        for message in refused[rank]:
            assert "into a mixture of DTensors and whole tensors: 'optimizer.state" in message
            assert "get_state_dict(model, optimizer)" in message


def test_ranks_that_change_places_in_their_processes(ranks: Ranks, tmp_path: Path) -> None:
    runs(ranks, "ranks_change_places", tmp_path, 3)
