"""What each rank and each host did in a restart.

Of a rank: the phases of its recovery, which begins when its process learned that the iteration must
end, by its own fault or by that of another rank. Of a host: the parts of the time outside the
function between two stretches of training. Unlike phases, parts follow each other: each ends when
the last rank of the host has finished it. Waits for replacements are taken out of the part in which
they were.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import outlast.events.types as ev
from outlast.events.event import Event, Record
from outlast.events.report import intervals as iv
from outlast.events.report.intervals import Interval, Stretch
from outlast.events.report.model import PHASE_FIELDS, Phases, RankRecovery, Recovery, Span

REPLACEMENTS = "replacements"
"""The name of the `BarrierPassed` event that ends the wait for replacements."""

PARTS = ("detection", "abort", "leave", "clean_up", "entry", REPLACEMENTS)
GAP_EVENTS = (
    ev.AbortDone, ev.BarrierPassed, ev.FinalizeDone, ev.Joined, ev.LeftFunction, ev.Lost,
    ev.Seen, ev.WorkerExited,
)  # fmt: skip
"""The events that divide the time between two stretches."""

_TIMED: dict[type[Event], str] = {
    ev.AbortDone: "abort",
    ev.FinalizeDone: "finalize",
    ev.HealthCheckDone: "health",
    ev.Assigned: "assign",
    ev.InitializeDone: "init",
}


def rank_recovery(
    place: ev.Assigned | ev.Entered, lane: int, events: Sequence[Event]
) -> RankRecovery:
    """The recovery of one rank, from its place in the iteration that ended, and its lane. `events`
    are those of its process from the end of that iteration to its next entry.
    """
    start = seen = end = left = None
    spans: list[Span] = []
    for event in events:
        name = event.name if isinstance(event, ev.BarrierPassed) else _TIMED.get(type(event))
        if name:
            seconds = float(getattr(event, "seconds", 0.0))
            spans.append(Span(state=name, start=event.time - seconds, end=event.time))
        elif isinstance(event, ev.Seen | ev.Fault):
            start = event.time if start is None else start
            seen = event.time if seen is None and isinstance(event, ev.Seen) else seen
        elif isinstance(event, ev.LeftFunction):
            left = event.time if left is None else left
        elif isinstance(event, ev.Entered):
            end = event.time
    aborted = next((span.end for span in spans if span.state == "abort"), None)
    if aborted is not None and left is not None:  # a rank that failed left before the abort
        spans.append(Span(state="leave", start=aborted, end=max(aborted, left)))
    return RankRecovery(
        host=place.host,
        pid=place.pid,
        rank=place.rank,
        lane=lane,
        start=start if start is not None else min((s.start for s in spans), default=place.time),
        end=end,
        seen=seen,
        phases=tuple(sorted(spans, key=lambda span: span.start)),
    )


def measure(ranks: Sequence[RankRecovery], fault: ev.Fault | None) -> Phases:
    """The phases of a restart of these survivors; `fault` is its first cause."""
    found: dict[str, Any] = {}
    for name, field in PHASE_FIELDS.items():
        spans = ([span for span in rank.phases if span.state == name] for rank in ranks)
        seconds = [sum(span.end - span.start for span in own) for own in spans if own]
        # The last to arrive at a barrier waits least.
        slowest = min if name in ("term", "start") else max
        found[field] = slowest(seconds, default=None)
    seen: dict[str, list[float]] = {}
    entered: dict[str, float] = {}
    for rank in ranks:
        if rank.seen is not None:
            seen.setdefault(rank.host, []).append(rank.seen)
        if rank.end is not None:
            entered[rank.host] = max(rank.end, entered.get(rank.host, rank.end))
    if fault is not None and fault.host in seen:
        found["detection"] = max(0.0, max(seen[fault.host]) - fault.time)
    if fault is not None and fault.host in entered:
        return Phases(**{**found, "total": max(0.0, entered[fault.host] - fault.time)})
    totals = [end - min(seen[host]) for host, end in entered.items() if host in seen]
    total = max(0.0, *totals) if totals else None
    return Phases(**{**found, "total": total}, total_from_seen=bool(totals))


class Gap(Record):
    """The time between two stretches on one host; `after` is the position of the second."""

    before: Stretch
    after: int
    parts: dict[str, list[Interval]]  # when each of `PARTS` was

    def recovery(self, host: str, setup: float, restore: float) -> Recovery:
        """What the host spent the restart on, with the times of the function up to its restore."""
        # Hung ranks made no progress before the stretch ended, if they had made any in it.
        hang = max(0.0, iv.length([self.before.hang]))
        parts = {name: iv.length(intervals) for name, intervals in self.parts.items()}
        total = hang + sum(parts.values()) + setup + restore
        return Recovery(host=host, hang=hang, **parts, setup=setup, restore=restore, total=total)


def gaps_of(stretches: Sequence[Stretch], events: Sequence[Event]) -> list[Gap]:
    """The gaps between the stretches of one host in one call; `events` are its `GAP_EVENTS`."""
    times = [event.time for event in events]
    found = []
    for number, (before, after) in enumerate(itertools.pairwise(stretches), start=1):
        if before.call == after.call:
            inside = events[bisect_left(times, before.end) : bisect_right(times, after.start)]
            parts = _divide(before, after.start, inside)
            found.append(Gap(before=before, after=number, parts=parts))
    return found


def _divide(before: Stretch, end: float, events: Sequence[Event]) -> dict[str, list[Interval]]:
    wrapped = any(isinstance(event, ev.Seen | ev.LeftFunction) for event in events)
    barriers = [event for event in events if isinstance(event, ev.BarrierPassed)]
    met = [event.time for event in barriers if event.name == "term"]
    begin = before.end
    ends: dict[str, list[float]] = {name: [] for name in PARTS[:-2]}
    ends["clean_up"] += met
    waits = [(e.time - e.seconds, e.time) for e in barriers if e.name == REPLACEMENTS]
    for event in events:
        if isinstance(event, ev.Seen):
            ends["detection"].append(event.time)
        elif isinstance(event, ev.AbortDone):
            ends["abort"].append(event.time)
        elif isinstance(event, ev.FinalizeDone):
            ends["clean_up"].append(event.time)
        elif (
            isinstance(event, ev.LeftFunction)
            or (isinstance(event, ev.WorkerExited) and not wrapped)
            # The survivors waited for this rank: one that does not leave is terminated at last.
            or (isinstance(event, ev.Lost) and event.time <= min(met, default=end))
        ):
            ends["leave"].append(event.time)
    if before.host_lost:  # until a fresh host with its name asks to join
        joined = (event.time for event in events if isinstance(event, ev.Joined))
        waits.append((begin, min(joined, default=end)))
    waiting = iv.intersection(iv.union(waits), iv.union([(begin, end)]))
    parts: dict[str, list[Interval]] = {}
    for name, moments in [*ends.items(), ("entry", [end])]:
        until = min(end, max(begin, *moments)) if moments else begin
        parts[name] = iv.difference(iv.union([(begin, until)]), waiting)
        begin = until
    return {**parts, REPLACEMENTS: waiting}
