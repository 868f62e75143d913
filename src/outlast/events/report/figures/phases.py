"""What each survivor of a restart did until its next entry, and the phases of the restart.

A rank's recovery begins when its process learned that the iteration must end, by its own fault or
by that of another rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import outlast.events as ev
from outlast.events.report.model import PHASE_FIELDS, Phases, RankRecovery, Span

_TIMED: dict[type[ev.Event], str] = {
    ev.AbortDone: "abort",
    ev.FinalizeDone: "finalize",
    ev.HealthCheckDone: "health",
    ev.Assigned: "assign",
    ev.InitializeDone: "init",
}


def rank_recovery(
    place: ev.Assigned | ev.Entered, lane: int, events: Sequence[ev.Event]
) -> RankRecovery:
    """The recovery of one rank.

    Args:
        place: its rank in the iteration that ended; `lane`: the rank of its lane.
        events: those of its process from the end of the iteration to its next entry.
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
        times = [_seconds(rank, name) for rank in ranks]
        known = [seconds for seconds in times if seconds is not None]
        # The last to arrive at a barrier waits least.
        found[field] = (min if name in ("term", "start") else max)(known, default=None)
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
    spans = [end - min(seen[host]) for host, end in entered.items() if host in seen]
    total = max(0.0, *spans) if spans else None
    return Phases(**{**found, "total": total}, total_from_seen=bool(spans))


def _seconds(rank: RankRecovery, phase: str) -> float | None:
    found = [span.end - span.start for span in rank.phases if span.state == phase]
    return sum(found) if found else None
