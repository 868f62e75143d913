"""The checkpoints of a run, from the events of rank 0; and the steps that each restart discarded,
which were completed before it and executed again after it.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import outlast.events.types as ev
from outlast.events.event import Event
from outlast.events.report.goodput import LIVE_SOURCES
from outlast.events.report.report import Restore, Save, Saves
from outlast.events.report.run import Run, order, record

STEPS, PINGS = "steps", "pings"

_STEP_EVENTS = (
    ev.CheckpointCommitted, ev.CheckpointRestored, ev.Fault, ev.LeftFunction,
    ev.NothingToRestore, ev.StepsDone,
)  # fmt: skip

E = TypeVar("E", bound=Event)


def summarize_saves(run: Run) -> Saves | None:
    """The checkpoints; `None` if there are no checkpoint events."""

    def own(*kinds: type[E]) -> list[E]:
        return [event for event in run.all(*kinds) if event.rank == 0]

    done, failed = own(ev.CheckpointCommitted), own(ev.CheckpointFailed)
    restored, passed = own(ev.CheckpointRestored), own(ev.CheckpointPassedOver)
    copied, not_copied = own(ev.CopyCompleted), own(ev.CopySkipped)
    if not (done or failed or restored or passed or copied or not_copied):
        return None
    ends: list[ev.CheckpointCommitted | ev.CheckpointFailed] = [*done, *failed]
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
        each=tuple(map(_save, sorted(ends, key=order))),
        restores=tuple(restores),
    )


def _save(event: ev.CheckpointCommitted | ev.CheckpointFailed) -> Save:
    cause = (event.cause or "it failed") if isinstance(event, ev.CheckpointFailed) else ""
    return record(Save, event, at=max(0.0, event.time - event.seconds), cause=cause)


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


def _ranks(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in sorted(ranks)]
    return f"{'rank' if len(names) == 1 else 'ranks'} {', '.join(names)}"


def redone_steps(
    segments: Sequence[Mapping[str, float]], run: Run
) -> tuple[list[int | None], str, bool]:
    """Counts the steps of each segment that were executed again: those after the restored one, up
    to the last completed one. `Job` records which steps it has completed. Without it, each ping
    counts as a step, so the number is approximate.

    Args:
        segments: when each began, on each host. A segment is what runs between two restarts: an
            iteration of a wrapped function, or the processes that the launcher started together.

    Returns:
        The number for each segment (`None`: not known); what the numbers are based on (`STEPS`,
        `PINGS` or an empty string); and whether a restart restored a checkpoint, or found that
        there was none yet.
    """
    parts = _split(segments, run)
    pinged = any(isinstance(e, ev.LeftFunction) and e.pings for part in parts for e in part)
    recorded = any(isinstance(e, ev.StepsDone) for part in parts for e in part)
    source = STEPS if recorded else PINGS if pinged else ""
    restored = [_restored_step(part) for part in parts]
    counts: list[int | None] = []
    for number, part in enumerate(parts):
        last = _last_step(part, restored[number], source)
        back = next((step for step in restored[number + 1 :] if step is not None), None)
        counts.append(None if last is None or back is None else max(0, last - back))
    known = any(count is not None for count in counts)
    return counts, source if known else "", any(step is not None for step in restored[1:])


def _split(segments: Sequence[Mapping[str, float]], run: Run) -> list[list[Event]]:
    """The events of each segment. Those before the first one belong to the first."""
    begins: dict[str, list[tuple[float, int]]] = {}
    for number, hosts in enumerate(segments):
        for host, time in hosts.items():
            begins.setdefault(host, []).append((time, number))
    for pairs in begins.values():
        pairs.sort()
    parts: list[list[Event]] = [[] for _ in segments]
    for event in run.all(*_STEP_EVENTS):
        if pairs := begins.get(event.host, []):
            # A checkpoint belongs to the segment in which its save began.
            took = event.seconds if isinstance(event, ev.CheckpointCommitted) else 0.0
            place = bisect_right(pairs, (event.time - took, len(segments))) - 1
            parts[pairs[max(0, place)][1]].append(event)
    return parts


def _restored_step(part: Sequence[Event]) -> int | None:
    """The step that the segment started from; `None` if it ended before, or has no checkpoints."""
    steps = [event.step for event in part if isinstance(event, ev.CheckpointRestored)]
    if any(isinstance(event, ev.NothingToRestore) for event in part):
        steps.append(0)
    return min(steps, default=None)


def _last_step(part: Sequence[Event], restored: int | None, source: str) -> int | None:
    """The last completed step of the segment; `None` if it is not known."""
    if restored is None:
        return None
    if source == STEPS:
        done = [event.last for event in part if isinstance(event, ev.StepsDone)]
        saved = [event.step for event in part if isinstance(event, ev.CheckpointCommitted)]
        return max(*done, *saved, restored) if done else None
    if source == PINGS:
        pings = [e.pings for e in part if isinstance(e, ev.LeftFunction | ev.Fault)]
        return restored + max(pings, default=0)
    return None
