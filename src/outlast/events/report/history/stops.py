"""Stop requests: which one ended the job, and which failures only followed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outlast.events import Event, Fault, Lost, StopRequested, WorkerExited
from outlast.events.report.history.call_history import CallHistory
from outlast.events.report.model import Stop
from outlast.system.error_text import exit_summary

_LEAVES = ("BASE_EXCEPTION", "TERMINATED")
"""How a rank that was told to stop leaves: with `SystemExit`, or killed by the signal."""


def find_stop(events: Sequence[Event], origins: Mapping[str, float]) -> Stop | None:
    """The first request to stop; `None` if there was none."""
    requests = [event for event in events if isinstance(event, StopRequested)]
    if not requests:
        return None
    # The launcher's request comes before those of the ranks, to which it is forwarded.
    first = min(requests, key=lambda event: (event.rank >= 0, event.time, event.rank))
    ends: dict[tuple[str, int], str] = {}
    for event in sorted(events, key=lambda event: event.time):
        if (
            isinstance(event, WorkerExited)
            and event.time >= first.time
            and event.host == first.host
        ):
            ends[event.host, event.rank] = exit_summary(event.exit_code)
    return Stop(
        reason=first.reason,
        host=first.host,
        at=first.time - origins.get(first.host, first.time),
        exits=tuple(f"rank {rank} ({text})" for (_, rank), text in sorted(ends.items())),
    )


def ended_by_stop(call: CallHistory, iteration: int, events: Sequence[Event]) -> bool:
    """Whether the iteration ended only because ranks left when the job was told to stop."""
    since: dict[str, float] = {}
    for event in events:
        if isinstance(event, StopRequested):
            since[event.host] = min(event.time, since.get(event.host, event.time))
    faults = [
        fault for fault in call.faults(iteration) if not (fault.consequence or fault.overtaken)
    ]
    lost = [event for event in call.during(iteration) if isinstance(event, Lost)]
    return bool(since and (faults or lost)) and all(
        not (isinstance(event, Fault) and event.interruption not in _LEAVES)
        and event.time >= since.get(event.host, float("inf"))
        for event in (*faults, *lost)
    )
