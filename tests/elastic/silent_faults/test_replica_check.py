"""A bit that flips in a parameter of a running rank is found, and the rank named."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.events import ReplicaMismatch
from outlast.events.report import load
from procs import Job, Line

Ranks = Callable[..., Job]
HOST = socket.gethostname()


class Run:
    """A job of `silent_faults.py`, run to its end."""

    def __init__(self, ranks: Ranks, path: Path, nprocs: int, **plan: Any) -> None:
        events = path / "events"
        events.mkdir(parents=True, exist_ok=True)
        arguments = json.dumps({"path": str(path / "checkpoints"), **plan})
        env = {"OUTLAST_EVENTS_DIR": str(events)}
        with ranks("silent_faults", arguments, nprocs=nprocs, env=env) as job:
            job.start_all()
            self.codes = job.wait_all()
            self.lines = [line for rank in range(nprocs) for line in job.lines(rank)]
            self.errors = [job.errors(rank) for rank in range(nprocs)]
        assert any(events.iterdir()), self.errors
        self.events = load(events)

    def of(self, event: str) -> list[Line]:
        return [line for line in self.lines if line["event"] == event]

    @property
    def mismatches(self) -> list[ReplicaMismatch]:
        return [event for event in self.events if isinstance(event, ReplicaMismatch)]

    @property
    def weights(self) -> str:
        (weights,) = {line["weights"] for line in self.of("ended")}
        return str(weights)


@pytest.mark.parametrize("culprit", [0, 2])
def test_the_majority_names_the_rank_the_host_and_the_parameter(
    ranks: Ranks, tmp_path: Path, culprit: int
) -> None:
    run = Run(
        ranks, tmp_path, 3, steps=40, flip=culprit, flip_at=6, replicas={"every": 4}, every=None
    )
    assert set(run.codes.values()) == {0}, run.errors
    first = run.mismatches[0]
    assert (first.ranks, first.hosts, first.majority) == ([culprit], [HOST], True)
    assert (first.step, first.clean_step, first.replicas) == (8, 4, 3)
    assert first.parameters == ["second.weight"]
    text = f"after step 8: rank {culprit} on {HOST} differs from the other 2 replicas, in second.we"
    assert all(text in errors for errors in run.errors)


def test_two_replicas_have_no_majority(ranks: Ranks, tmp_path: Path) -> None:
    run = Run(ranks, tmp_path, 2, steps=30, flip=1, flip_at=6, replicas={"every": 4}, every=None)
    assert set(run.codes.values()) == {0}, run.errors
    first = run.mismatches[0]
    assert (first.ranks, first.hosts, first.majority) == ([0, 1], [HOST, HOST], False)
    assert "no majority of replicas says which is wrong" in run.errors[0]
