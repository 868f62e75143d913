"""Summarizes the checkpoints of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from outlast.events.report.model import Saves
from outlast.events.types import (
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointPassedOver,
    CheckpointRestored,
    Event,
)


def summarize_saves(events: Iterable[Event]) -> Saves | None:
    """The checkpoints in an event log; `None` if there are no checkpoint events."""
    own = [event for event in events if event.rank == 0]
    done = [event for event in own if isinstance(event, CheckpointCommitted)]
    failed = [event for event in own if isinstance(event, CheckpointFailed)]
    restored = [event for event in own if isinstance(event, CheckpointRestored)]
    skipped = [event for event in own if isinstance(event, CheckpointPassedOver)]
    if not (done or failed or restored or skipped):
        return None
    last = max(done, key=lambda e: e.time, default=None)
    return Saves(
        committed=len(done),
        size_bytes=0 if last is None else last.size_bytes,
        newest=-1 if last is None else last.step,
        blocked_median=statistics.median(e.blocked_seconds for e in done) if done else 0.0,
        blocked_worst=max((e.blocked_seconds for e in done), default=0.0),
        durable_median=statistics.median(e.seconds for e in done) if done else 0.0,
        failed=tuple((e.step, e.cause) for e in failed),
        restored=tuple((e.step, e.source) for e in restored),
        passed_over=tuple((e.step, e.cause) for e in skipped),
    )
