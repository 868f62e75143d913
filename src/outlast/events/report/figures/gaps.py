"""Divides the time outside the function, between two stretches of training, into its parts; and
what each restart took.

The parts follow each other: detection, abort, leave, clean-up, entry. Each ends when the last rank
of the host has finished it. Waits for replacements are taken out of the part in which they were.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import outlast.events as ev
from outlast.events.report.figures import intervals as iv
from outlast.events.report.figures.intervals import Interval
from outlast.events.report.figures.stretches import Stretch
from outlast.events.report.model import Recovery

REPLACEMENTS = "replacements"
"""The name of the `BarrierPassed` event that ends the wait for replacements."""

GAP_EVENTS = (
    *(ev.AbortDone, ev.BarrierPassed, ev.FinalizeDone, ev.Joined, ev.LeftFunction, ev.Lost),
    *(ev.Seen, ev.WorkerExited),
)
"""The events that divide a gap."""

PARTS = ("detection", "abort", "leave", "clean_up", "entry", REPLACEMENTS)


@dataclasses.dataclass(frozen=True)
class Gap:
    """The time between two stretches on one host.

    Attributes:
        after: the position of the stretch that followed.
        parts: when each of `PARTS` was.
    """

    before: Stretch
    after: int
    parts: dict[str, list[Interval]]

    def recovery(self, host: str, restore: float) -> Recovery:
        """What the host spent the restart on; `restore` is the time from the entry."""
        # Hung ranks made no progress before the stretch ended, if they had made any in it.
        hang = max(0.0, self.before.end - max(self.before.start, self.before.hung_from))
        parts = {name: iv.length(intervals) for name, intervals in self.parts.items()}
        total = hang + sum(parts.values()) + restore
        return Recovery(host=host, hang=hang, **parts, restore=restore, total=total)


def gaps_of(stretches: Sequence[Stretch], events: Sequence[ev.Event]) -> list[Gap]:
    """The gaps between the stretches of one host that belong to one call of the function.

    Args:
        stretches: those of the host, in order.
        events: `GAP_EVENTS` of the host, ordered by time.
    """
    times = [event.time for event in events]
    found = []
    for number, (before, after) in enumerate(itertools.pairwise(stretches), start=1):
        if before.call == after.call:
            inside = slice(bisect_left(times, before.end), bisect_right(times, after.start))
            found.append(Gap(before, number, _divide(before, after.start, events[inside])))
    return found


def _divide(before: Stretch, end: float, events: Sequence[ev.Event]) -> dict[str, list[Interval]]:
    wrapped = any(isinstance(event, ev.Seen | ev.LeftFunction) for event in events)
    terms = [event.time for event in events if _is_barrier(event, "term")]
    met = min(terms, default=end)
    ends: dict[str, list[float]] = {name: [] for name in PARTS[:-2]}
    waits: list[Interval] = []
    for event in events:
        if isinstance(event, ev.Seen):
            ends["detection"].append(event.time)
        elif isinstance(event, ev.AbortDone):
            ends["abort"].append(event.time)
        elif isinstance(event, ev.LeftFunction) or (
            isinstance(event, ev.WorkerExited) and not wrapped
        ):
            ends["leave"].append(event.time)
        elif isinstance(event, ev.Lost) and event.time <= met:
            # The survivors waited for this rank: one that does not leave is terminated at last.
            ends["leave"].append(event.time)
        elif isinstance(event, ev.FinalizeDone) or _is_barrier(event, "term"):
            ends["clean_up"].append(event.time)
        elif isinstance(event, ev.BarrierPassed) and event.name == REPLACEMENTS:
            waits.append((event.time - event.seconds, event.time))
    begin = before.end
    if before.host_lost:  # until a fresh host with its name asks to join
        joined = (event.time for event in events if isinstance(event, ev.Joined))
        waits.append((begin, min(joined, default=end)))
    waiting = iv.intersection(iv.union(waits), iv.union([(begin, end)]))
    parts: dict[str, list[Interval]] = {}
    for name, moments in ends.items():
        until = min(end, max(begin, *moments)) if moments else begin
        parts[name] = iv.difference(iv.union([(begin, until)]), waiting)
        begin = until
    parts["entry"] = iv.difference(iv.union([(begin, end)]), waiting)
    return {**parts, REPLACEMENTS: waiting}


def _is_barrier(event: ev.Event, name: str) -> bool:
    return isinstance(event, ev.BarrierPassed) and event.name == name
