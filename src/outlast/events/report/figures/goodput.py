"""Goodput: divides the wall time of a host into productive time and the kinds of lost time.

Each moment belongs to the first kind that applies, so the parts add up to the wall time:

    restart   not every active rank of the host was in the function, or the host knew of a fault
    hang      from the last progress of hung ranks, or of a lost host, to the end of the iteration
    setup     from the entry into the function to the end of the restore
    saves     `save` blocked training
    redone    the state of this moment was discarded: a later restore went back to a state before it
    reduced   of the rest: the share of the ranks that the job had before, and lacked now

A restore of step S discards the time since the job's state was that of step S: since the save of S
began, or since an earlier restore of S. So redone work is measured without the times of steps.
A restore from the ranks' own state before the fault discards the steps after it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

import outlast.events as ev
from outlast.events.report.figures.gaps import PARTS, gaps_of
from outlast.events.report.figures.intervals import (
    Interval,
    difference,
    intersection,
    length,
    union,
)
from outlast.events.report.figures.stretches import Stretch
from outlast.events.report.model import HostTime, LostTime, TimeOutside

Save = ev.CheckpointCommitted | ev.CheckpointFailed
Restore = ev.CheckpointRestored | ev.NothingToRestore

LIVE_SOURCES = ("live", "replica")
"""Sources of a restore that are no checkpoint: the state of the ranks before the fault."""


def host_time(
    host: str, stretches: Sequence[Stretch], walls: Sequence[Interval], events: Sequence[ev.Event]
) -> HostTime:
    """The productive and the lost time of a host with these events."""
    wall = union(walls)
    begin = wall[0][0] if wall else 0.0
    worked = union((each.start, each.end) for each in stretches)
    outside = difference(wall, worked)
    layers = {
        "hang": union((max(each.start, each.hung_from), each.end) for each in stretches),
        "setup": union(_setup_times(stretches, events)),
        "saves": union(
            (_began(e), _began(e) + e.blocked_seconds) for e in events if isinstance(e, Save)
        ),
        "redone": _discarded(events, begin),
    }
    lost, rest = {"restart": length(outside)}, worked
    for name, layer in layers.items():
        lost[name] = length(intersection(rest, layer))
        rest = difference(rest, layer)
    productive, left = 0.0, rest
    for size in sorted({each.size for each in stretches}):
        of_size = union((each.start, each.end) for each in stretches if each.size == size)
        productive += size * length(intersection(left, of_size))
        left = difference(left, of_size)
    lost["reduced"] = length(rest) - productive
    parts, between = {}, outside
    gaps = gaps_of(stretches, events)
    for name in PARTS:
        layer = union(interval for gap in gaps for interval in gap.parts[name])
        parts[name] = length(intersection(between, layer))
        between = difference(between, layer)
    started = [event.time for event in events if isinstance(event, ev.WorkerStarted)]
    return HostTime(
        host=host,
        wall_seconds=length(wall),
        productive_seconds=productive,
        goodput=productive / length(wall) if wall else None,
        lost=LostTime(
            **lost,
            replacements=parts["replacements"],
            restart_parts=TimeOutside(**parts, uneven=length(between)),
        ),
        start_seconds=max(0.0, begin - started[0]) if wall and started else None,
    )


def restore_times(stretches: Sequence[Stretch], events: Sequence[ev.Event]) -> dict[int, Interval]:
    """From the start of each stretch to the end of the first restore of the slowest process, by the
    position of the stretch.
    """
    starts = [each.start for each in stretches]
    ends: dict[int, dict[int, float]] = defaultdict(dict)
    for event in events:
        if isinstance(event, Restore) and (number := bisect_right(starts, event.time) - 1) >= 0:
            ends[number].setdefault(event.pid, event.time)
    return {number: (starts[number], max(times.values())) for number, times in ends.items()}


def _setup_times(stretches: Sequence[Stretch], events: Sequence[ev.Event]) -> list[Interval]:
    """From the start of each stretch to its restore. If the other stretches have a restore, and
    this one has neither that nor a step or a save, it ended before its restore (or is still there).
    """
    restored = restore_times(stretches, events)
    if not restored:
        return []
    starts = [each.start for each in stretches]
    trained = {
        bisect_right(starts, _began(event) if isinstance(event, Save) else event.time) - 1
        for event in events
        if isinstance(event, Save | ev.StepsDone)
        or (isinstance(event, ev.LeftFunction) and event.pings)
    }
    unfinished = [
        (each.start, each.end)
        for number, each in enumerate(stretches)
        if number not in restored and number not in trained
    ]
    return [*restored.values(), *unfinished]


def _discarded(events: Sequence[ev.Event], begin: float) -> list[Interval]:
    """The time whose state a restore discarded; `begin` is the beginning of the wall time."""
    moments = [(_began(event), event.step) for event in events if isinstance(event, Save)]
    restored = [event for event in events if isinstance(event, Restore)]
    moments += [(e.time, e.step) for e in restored if isinstance(e, ev.CheckpointRestored)]
    moments.sort()
    by_step: dict[int, list[float]] = defaultdict(list)
    for time, step in moments:
        by_step[step].append(time)
    found = []
    for event in restored:
        if isinstance(event, ev.NothingToRestore):
            step, start = -1, event.time
        else:
            step, start = event.step, event.time - event.seconds
            if event.source in LIVE_SOURCES:
                found.append(_beyond(step, start, events, moments))
                continue
        before = by_step[step][: bisect_right(by_step[step], start)]
        found.append((before[-1] if before else begin, start))
    return union(found)


def _beyond(
    step: int, start: float, events: Sequence[ev.Event], moments: Sequence[tuple[float, int]]
) -> Interval:
    """The time of the completed steps after the one that a living rank still had at `start`: rarely
    more than one. No save tells when they began, so they count as long as those before, on average.
    """
    restored = [e.time for e in events if isinstance(e, Restore) and e.time < start]
    since_restore = max(restored, default=float("-inf"))
    done = [e for e in events if isinstance(e, ev.StepsDone) and since_restore <= e.time <= start]
    last = max(done, key=lambda each: each.last, default=None)
    if last is None or last.last <= step:
        return start, start
    since, first = max((m for m in moments if m[0] < last.time), default=(last.time, last.last))
    each = (last.time - since) / max(1, last.last - max(first, 0))
    return last.time - each * (last.last - step), last.time


def _began(save: Save) -> float:
    return save.time - save.seconds
