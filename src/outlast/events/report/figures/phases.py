"""Measures the phases of a restart for its survivors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outlast.events import (
    AbortDone,
    Assigned,
    BarrierPassed,
    Entered,
    Event,
    Fault,
    FinalizeDone,
    HealthCheckDone,
    InitializeDone,
    LeftFunction,
    Seen,
)
from outlast.events.report.history.call_history import CallHistory
from outlast.events.report.model import Phases

Timed = AbortDone | Assigned | BarrierPassed | FinalizeDone | HealthCheckDone | InitializeDone


def measure_phases(call: CallHistory, iteration: int, fault: Fault | None) -> Phases:
    """Measures the restart that ended `iteration`; `fault` is its first cause."""
    windows = [call.recovery(member, iteration) for member in call.survivors(iteration)]
    total, from_seen = _total(call, windows, iteration, fault)

    def longest(kind: type[Timed]) -> float | None:
        return max(_known(_seconds(window, kind) for window in windows), default=None)

    def last_to_arrive(name: str) -> float | None:
        seconds = (_seconds(window, BarrierPassed, name) for window in windows)
        return min(_known(seconds), default=None)

    return Phases(
        detection=_detection(windows, fault),
        abort=longest(AbortDone),
        interrupt=max(_known(map(_interrupt, windows)), default=None),
        finalize=longest(FinalizeDone),
        health_check=longest(HealthCheckDone),
        termination_barrier=last_to_arrive("term"),
        assignment=longest(Assigned),
        start_barrier=last_to_arrive("start"),
        initialize=longest(InitializeDone),
        total=total,
        total_from_seen=from_seen,
    )


def _detection(windows: list[list[Event]], fault: Fault | None) -> float | None:
    if fault is None:
        return None
    seen = (_first(window, Seen) for window in windows)
    here = [event.time for event in seen if event is not None and event.host == fault.host]
    return max(0.0, max(here) - fault.time) if here else None


def _interrupt(window: list[Event]) -> float | None:
    abort, left = _first(window, AbortDone), _first(window, LeftFunction)
    if abort is None or left is None:
        return None
    return max(0.0, left.time - abort.time)  # a rank that failed left before the abort


def _total(
    call: CallHistory, windows: list[list[Event]], iteration: int, fault: Fault | None
) -> tuple[float | None, bool]:
    by_host: dict[str, list[float]] = {}
    starts: dict[str, float] = {}
    for window in windows:
        seen = _first(window, Seen)
        if seen is not None:
            starts[seen.host] = min(seen.time, starts.get(seen.host, seen.time))
        last = window[-1] if window else None
        if isinstance(last, Entered) and last.iteration == iteration + 1:
            by_host.setdefault(last.host, []).append(last.time)
    if fault is not None and fault.host in by_host:
        return max(0.0, max(by_host[fault.host]) - fault.time), False
    spans = [max(by_host[host]) - starts[host] for host in by_host if host in starts]
    return (max(0.0, *spans) if spans else None), bool(spans)


def _first(window: list[Event], kind: type[Event]) -> Event | None:
    return next((event for event in window if isinstance(event, kind)), None)


def _seconds(window: list[Event], kind: type[Timed], name: str = "") -> float | None:
    found = [
        event.seconds
        for event in window
        if isinstance(event, kind) and (not name or getattr(event, "name", "") == name)
    ]
    return sum(found) if found else None


def _known(values: Iterable[float | None]) -> Iterator[float]:
    return (value for value in values if value is not None)
