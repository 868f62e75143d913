"""Splits a run's events into calls of a wrapped function; each call counts its iterations from 0.

A process that calls a wrapped function twice writes both calls to one log. A new call of a process
begins where the process is assigned a rank after it has completed, or in an earlier iteration than
its last one. Events of other processes (a monitor, a joiner) belong to the call that their host
was in at the time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from outlast.events import Assigned, Completed, Entered, Event

Process = tuple[str, int]
"""Host and process id."""


def main_processes(events: Iterable[Event]) -> set[Process]:
    """The processes that are ranks themselves; a monitor only reports on one."""
    return {(event.host, event.pid) for event in events if isinstance(event, Assigned | Entered)}


def split_calls(events: Iterable[Event]) -> list[list[Event]]:
    """The events of each call, in the order of the calls; at least one list."""
    by_process: dict[Process, list[Event]] = defaultdict(list)
    for event in events:
        by_process[event.host, event.pid].append(event)
    for log in by_process.values():
        log.sort(key=lambda event: event.time)
    ranks = main_processes(event for log in by_process.values() for event in log)

    calls: dict[int, list[Event]] = defaultdict(list, {0: []})
    ends: dict[str, dict[int, float]] = defaultdict(dict)  # of each host's calls but the last

    def call_at(host: str, time: float) -> int:
        return sum(end < time for end in ends[host].values())

    for process in sorted(ranks, key=lambda process: (by_process[process][0].time, process)):
        segments, host = _segments(by_process[process]), process[0]
        first = call_at(host, segments[0][0].time)
        for number, segment in enumerate(segments, start=first):
            calls[number].extend(segment)
            if segment is not segments[-1]:
                ends[host][number] = max(segment[-1].time, ends[host].get(number, -math.inf))
    for process, log in by_process.items():
        if process not in ranks:
            for event in log:
                calls[call_at(event.host, event.time)].append(event)
    return [calls[number] for number in range(max(calls) + 1)]


def _segments(log: list[Event]) -> list[list[Event]]:
    segments: list[list[Event]] = [[]]
    iteration, completed = -1, False
    for event in log:
        if isinstance(event, Assigned | Entered):
            if completed or event.iteration < iteration:
                segments.append([])
                completed = False
            iteration = event.iteration
        completed = completed or isinstance(event, Completed)
        segments[-1].append(event)
    return segments
