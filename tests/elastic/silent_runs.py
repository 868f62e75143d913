"""Runs `silent_faults.py` to its end: the exit codes, what the ranks said, and the events."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from outlast.events.event import Event
from outlast.events.report import load
from procs import Job, Line

Ranks = Callable[..., Job]
E = TypeVar("E", bound=Event)


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

    def found(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def weights(self) -> str:
        (weights,) = {line["weights"] for line in self.of("ended")}
        return str(weights)
