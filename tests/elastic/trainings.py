"""Runs training jobs in real processes, one after another on one folder, and reads their events."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from procs import Job

Ranks = Callable[[str, int], Job]
Fault = dict[str, Any]


def fault(what: str, step: int, *ranks: int, when: str = "before") -> list[Fault]:
    """Plans the fault `what` on `ranks` at `step`."""
    return [{"what": what, "step": step, "rank": rank, "when": when} for rank in ranks]


@dataclasses.dataclass
class Stage:
    """The results of one job of `trains.py`."""

    size: int
    codes: dict[int, int]
    lines: list[list[dict[str, Any]]]
    errors: list[str]

    def said(self, event: str) -> list[dict[str, Any]]:
        """The last such event of each rank."""
        return [
            next(line for line in reversed(lines) if line["event"] == event) for lines in self.lines
        ]

    @property
    def start_step(self) -> int:
        """The restored step, the same on all ranks."""
        (step,) = {line["step"] for line in self.said("restored")}
        return int(step)

    def steps(self) -> dict[int, list[dict[str, Any]]]:
        """The events of all ranks, for each step that all ranks completed."""
        found: dict[int, list[dict[str, Any]]] = {}
        for lines in self.lines:
            for line in lines:
                if line["event"] == "trained":
                    found.setdefault(line["step"], []).append(line)
        return {step: said for step, said in found.items() if len(said) == self.size}


class Trainings:
    """The jobs that train on one folder of checkpoints."""

    def __init__(self, ranks: Ranks, path: Path, **plan: Any) -> None:
        self._ranks = ranks
        self.plan = {"path": str(path), **plan}
        self.stages: list[Stage] = []

    def run(
        self, size: int, faults: Sequence[Fault] = (), *, killed: bool = False, **plan: Any
    ) -> Stage:
        """Runs a job of this size to its end; with `killed`, the faults kill some ranks, and the
        others are killed then.
        """
        arguments = json.dumps({**self.plan, "faults": list(faults), **plan})
        with self._ranks(arguments, size) as job:
            job.start_all()
            if killed:
                for each in faults:
                    job.wait(each["rank"])
                for rank in range(size):
                    if job.running(rank):
                        job.kill(rank)
            codes = job.wait_all()
            stage = Stage(
                size,
                codes,
                [job.lines(rank) for rank in range(size)],
                [job.errors(rank) for rank in range(size)],
            )
        self.stages.append(stage)
        return stage

    def lineage(self) -> dict[int, list[dict[str, Any]]]:
        """The events that led to the final weights: those of each step's last execution."""
        found: dict[int, list[dict[str, Any]]] = {}
        for stage in self.stages:
            start_step = stage.start_step
            assert set(range(1, start_step + 1)) <= set(found), (
                "it starts from a step of an earlier job"
            )
            found = {step: said for step, said in found.items() if step <= start_step}
            found.update(stage.steps())
        return found


def samples(said: Sequence[dict[str, Any]]) -> list[int]:
    """The samples of a step, over all ranks."""
    return [index for line in said for index in line["indices"]]


def parts(said: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """The exact losses of a step, by virtual replica."""
    return sorted(part for line in said for part in line["losses"])


def loss(said: Sequence[dict[str, Any]], *, averaged: bool) -> float:
    """The loss of a step over the global batch."""
    losses = [each for line in said for each in line["losses"]]
    total = sum(weight * float.fromhex(value) for _, weight, value in losses)
    return total / (len(said) if averaged else 1)


def check_exactly_once(steps: dict[int, list[dict[str, Any]]], length: int, batch: int) -> None:
    """Checks that each epoch has every sample once, and that no step is missing."""
    assert sorted(steps) == list(range(1, len(steps) + 1))
    per_epoch = -(-length // batch)
    assert len(steps) % per_epoch == 0
    for first in range(1, len(steps), per_epoch):
        seen = [i for step in range(first, first + per_epoch) for i in samples(steps[step])]
        assert sorted(seen) == list(range(length))


def check_same_losses(
    one: dict[int, list[dict[str, Any]]], other: dict[int, list[dict[str, Any]]], *, averaged: bool
) -> None:
    """Checks that two loss curves are equal."""
    assert one.keys() == other.keys()
    for step in one:
        assert loss(one[step], averaged=averaged) == pytest.approx(
            loss(other[step], averaged=averaged), rel=1e-4
        )
