"""Summarizes the checkpoints of a run, from the events of rank 0."""

from __future__ import annotations

import statistics
from typing import TypeVar

import outlast.events as ev
from outlast.events.report.figures.goodput import LIVE_SOURCES
from outlast.events.report.one_pass import Run, record
from outlast.events.report.report import Restore, Save, Saves

E = TypeVar("E", bound=ev.Event)


def summarize_saves(run: Run) -> Saves | None:
    """The checkpoints; `None` if there are no checkpoint events."""

    def own(kind: type[E]) -> list[E]:
        return [event for event in run.all(kind) if event.rank == 0]

    done, failed = own(ev.CheckpointCommitted), own(ev.CheckpointFailed)
    restored, passed = own(ev.CheckpointRestored), own(ev.CheckpointPassedOver)
    copied, not_copied = own(ev.CopyCompleted), own(ev.CopySkipped)
    if not (done or failed or restored or passed or copied or not_copied):
        return None
    saves = [
        _save(e) for e in run.any_of(ev.CheckpointCommitted, ev.CheckpointFailed) if e.rank == 0
    ]
    restores = [record(Restore, each, source=_source(each, run)) for each in restored]
    blocked = [event.blocked_seconds for event in done]
    return Saves(
        committed=len(done),
        size_bytes=done[-1].size_bytes if done else 0,
        newest=done[-1].step if done else -1,
        blocked_median=statistics.median_low(blocked) if done else 0.0,
        blocked_worst=max(blocked, default=0.0),
        durable_median=statistics.median_low(e.seconds for e in done) if done else 0.0,
        failed=tuple((e.step, e.cause) for e in failed),
        restored=tuple((each.step, each.source) for each in restores),
        passed_over=tuple((e.step, e.cause) for e in passed),
        copied=len(copied),
        copied_bytes=copied[-1].own_bytes if copied else 0,
        copied_median=statistics.median_low(e.seconds for e in copied) if copied else 0.0,
        not_copied=tuple((e.step, e.cause) for e in not_copied),
        removed=len(own(ev.CheckpointRemoved)),
        each=tuple(saves),
        restores=tuple(restores),
    )


def _save(event: ev.Event) -> Save:
    assert isinstance(event, ev.CheckpointCommitted | ev.CheckpointFailed)
    failed = isinstance(event, ev.CheckpointFailed)
    cause = (event.cause or "it failed") if isinstance(event, ev.CheckpointFailed) else ""
    at = max(0.0, event.time - event.seconds)
    return record(Save, event, at=at, cause=cause, **({"size_bytes": 0} if failed else {}))


def _source(restored: ev.CheckpointRestored, run: Run) -> str:
    """The source of a restore; of one from the state of the ranks, those that were sent it; of one
    from copies, the ranks that fetched theirs, and from where.
    The times of different hosts are not comparable, so their events are found by the step.
    """
    same = [event for event in run.all(ev.CheckpointRestored) if event.step == restored.step]
    if restored.source in LIVE_SOURCES:
        sent = {event.rank for event in same if event.source == "replica"}
        return f"the ranks' own state{f', sent to {_ranks(sent)}' if sent else ''}"
    if restored.source != "copies":
        return restored.source
    fetched: dict[str, set[int]] = {}
    for event in same:
        if event.held_by:
            fetched.setdefault(event.held_by, set()).add(event.rank)
    each = [
        f"{_ranks(ranks)} from {'its copy' if len(ranks) == 1 else 'their copies'} on host {host}"
        for host, ranks in sorted(fetched.items())
    ]
    return f"memory ({'; '.join(each)})" if each else "memory and copies"


def _ranks(ranks: set[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, sorted(ranks)))}"
