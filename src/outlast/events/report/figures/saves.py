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
    CopyCompleted,
    CopySkipped,
    Event,
)


def summarize_saves(events: Iterable[Event]) -> Saves | None:
    """The checkpoints in an event log; `None` if there are no checkpoint events."""
    events = list(events)
    own = [event for event in events if event.rank == 0]
    done = [event for event in own if isinstance(event, CheckpointCommitted)]
    failed = [event for event in own if isinstance(event, CheckpointFailed)]
    restored = [event for event in own if isinstance(event, CheckpointRestored)]
    skipped = [event for event in own if isinstance(event, CheckpointPassedOver)]
    copied = [event for event in own if isinstance(event, CopyCompleted)]
    not_copied = [event for event in own if isinstance(event, CopySkipped)]
    if not (done or failed or restored or skipped or copied or not_copied):
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
        restored=tuple((e.step, _source(e, events)) for e in restored),
        passed_over=tuple((e.step, e.cause) for e in skipped),
        copied=len(copied),
        copied_bytes=copied[-1].own_bytes if copied else 0,
        copied_median=statistics.median(e.seconds for e in copied) if copied else 0.0,
        not_copied=tuple((e.step, e.cause) for e in not_copied),
    )


def _source(restored: CheckpointRestored, events: Iterable[Event]) -> str:
    """The source of a restore; of one from copies, the ranks that fetched theirs, and from where.
    The times of different hosts are not comparable, so their events are found by the step.
    """
    if restored.source != "copies":
        return restored.source
    fetched: dict[str, set[int]] = {}
    for event in events:
        if isinstance(event, CheckpointRestored) and event.step == restored.step and event.held_by:
            fetched.setdefault(event.held_by, set()).add(event.rank)
    each = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, sorted(ranks)))} from "
        f"{'its copy' if len(ranks) == 1 else 'their copies'} on host {host}"
        for host, ranks in sorted(fetched.items())
    ]
    return "memory (" + "; ".join(each) + ")" if each else "memory and copies"
