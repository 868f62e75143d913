"""Summarizes the checkpoints of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from outlast.events import (
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointPassedOver,
    CheckpointRemoved,
    CheckpointRestored,
    CopyCompleted,
    CopySkipped,
    Event,
)
from outlast.events.report.figures.goodput import LIVE_SOURCES
from outlast.events.report.model import Restore, Save, Saves


def summarize_saves(events: Iterable[Event], origins: Mapping[str, float]) -> Saves | None:
    """The checkpoints in an event log; `None` if there are no checkpoint events.

    Args:
        origins: the time of the first event of each host.
    """
    events = list(events)
    own = [event for event in events if event.rank == 0]
    done = [event for event in own if isinstance(event, CheckpointCommitted)]
    failed = [event for event in own if isinstance(event, CheckpointFailed)]
    restored = [event for event in own if isinstance(event, CheckpointRestored)]
    skipped = [event for event in own if isinstance(event, CheckpointPassedOver)]
    copied = [event for event in own if isinstance(event, CopyCompleted)]
    ended = [event for event in own if isinstance(event, CheckpointCommitted | CheckpointFailed)]
    not_copied = [event for event in own if isinstance(event, CopySkipped)]
    if not (done or failed or restored or skipped or copied or not_copied):
        return None
    last = max(done, key=lambda e: e.time, default=None)
    return Saves(
        committed=len(done),
        size_bytes=0 if last is None else last.size_bytes,
        newest=-1 if last is None else last.step,
        blocked_median=statistics.median_low(e.blocked_seconds for e in done) if done else 0.0,
        blocked_worst=max((e.blocked_seconds for e in done), default=0.0),
        durable_median=statistics.median_low(e.seconds for e in done) if done else 0.0,
        failed=tuple((e.step, e.cause) for e in failed),
        restored=tuple((e.step, _source(e, events)) for e in restored),
        passed_over=tuple((e.step, e.cause) for e in skipped),
        copied=len(copied),
        copied_bytes=copied[-1].own_bytes if copied else 0,
        copied_median=statistics.median_low(e.seconds for e in copied) if copied else 0.0,
        not_copied=tuple((e.step, e.cause) for e in not_copied),
        removed=sum(isinstance(event, CheckpointRemoved) for event in own),
        each=tuple(_save(event, origins) for event in ended),
        restores=tuple(
            Restore(
                step=e.step,
                host=e.host,
                at=e.time - origins.get(e.host, e.time),
                source=_source(e, events),
                seconds=e.seconds,
            )
            for e in restored
        ),
    )


def _save(event: CheckpointCommitted | CheckpointFailed, origins: Mapping[str, float]) -> Save:
    return Save(
        step=event.step,
        host=event.host,
        at=max(0.0, event.time - event.seconds - origins.get(event.host, event.time)),
        blocked_seconds=event.blocked_seconds,
        seconds=event.seconds,
        size_bytes=event.size_bytes if isinstance(event, CheckpointCommitted) else 0,
        cause=(event.cause or "it failed") if isinstance(event, CheckpointFailed) else "",
    )


def _source(restored: CheckpointRestored, events: Iterable[Event]) -> str:
    """The source of a restore; of one from the state of the ranks, those that were sent it; of one
    from copies, the ranks that fetched theirs, and from where.
    The times of different hosts are not comparable, so their events are found by the step.
    """
    if restored.source in LIVE_SOURCES:
        sent = {
            event.rank
            for event in events
            if isinstance(event, CheckpointRestored)
            and (event.step, event.source) == (restored.step, "replica")
        }
        ranks = ", ".join(str(rank) for rank in sorted(sent))
        to = f", sent to {'rank' if len(sent) == 1 else 'ranks'} {ranks}" if sent else ""
        return f"the ranks' own state{to}"
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
