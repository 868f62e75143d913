"""Writes the events of a synthetic run into logs, one file per process, and follows them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from events.synthetic_run import SyntheticRun
from outlast.events.emitter import JsonlSink
from outlast.events.event import Event
from outlast.events.types import (
    CheckpointCommitted,
    CheckpointRestored,
    NothingToRestore,
    StepsDone,
)


class Logs:
    """The logs of a run in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def write(self, events: Iterable[Event]) -> None:
        for event in events:
            sink = JsonlSink(self.folder / f"{event.host}-{event.pid}.jsonl")
            sink.write(event)
            sink.close()


def eventful_run(host: str = "a") -> list[Event]:
    """Three ranks; an exception, a SIGKILL whose rank is replaced, a restore of an older step."""
    run = SyntheticRun((host,) * 3, {host: 100.0})
    run.begin(0.0)
    for member in run.view:
        run.write(member, NothingToRestore(), 0.5)
        run.write(member, StepsDone(first=0, last=50), 5.0)
        saved = CheckpointCommitted(step=40, size_bytes=10**6, blocked_seconds=0.25, seconds=1.0)
        run.write(member, saved, 5.5)
    run.fault(1, 8.0)
    run.restart(8.0)
    for member in run.view:
        run.write(member, CheckpointRestored(step=40, source="memory", seconds=0.125), 9.0)
        run.write(member, StepsDone(first=40, last=60), 20.0)
    run.death(2, 21.0)
    run.restart(21.0, lost=[2], joiners=[host])
    for member in run.view:
        run.write(member, CheckpointRestored(step=40, source="memory", seconds=0.125), 22.0)
        run.write(member, StepsDone(first=40, last=100, cpu_seconds=1.2), 40.0)
    run.complete(41.0)
    return sorted(run.events, key=lambda event: event.time)
