"""The one pass over the events of a run: each goes to its host, its process, its kind and its call.

Every figure of the report is computed from what this pass keeps, and reads only the events that it
is about. From here on, times are in seconds from the first event of their host.

A process that calls a wrapped function twice writes both calls to one log, and each call counts its
iterations from 0. A new call of a process begins where the process is assigned a rank after it has
completed, or in an earlier iteration than its last one. Events of other processes (a monitor, a
joiner) belong to the call that their host was in at the time.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeVar

import outlast.events.types as ev
from outlast.events.event import Event, Note
from outlast.events.run_folders import TORN_LINE
from outlast.system.error_text import exit_summary

Process = tuple[str, int]
"""Host and process ID."""

E = TypeVar("E", bound=Event)
R = TypeVar("R")


class Run:
    """The events of a run, indexed: those of one process are given in the order of its log."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.torn: list[str] = []  # the logs with a torn last line
        self.exits: dict[Process, str] = {}  # how each process of a launcher ended, in words
        # the rank of each process in the launcher's messages
        self.launcher_ranks: dict[Process, int] = {}
        # the rank by which a process is known: that, or else its first one
        self.lanes: dict[Process, int] = {}
        self.stops: dict[str, float] = {}  # when each host was first told to stop
        self.ends: dict[str, float] = {}  # the last event of each host
        self._kinds: dict[tuple[type[Event], str | None], list[Any]] = defaultdict(list)
        processes: dict[Process, list[Event]] = defaultdict(list)
        ranks: set[Process] = set()
        self.events = self._by_clock(events)  # all of them, by the clock of each host
        for event in self.events:
            process = event.host, event.pid
            self._kinds[type(event), None].append(event)
            self._kinds[type(event), event.host].append(event)
            self.ends[event.host] = event.time
            processes[process].append(event)
            if isinstance(event, ev.Assigned | ev.Entered):
                ranks.add(process)
                self.lanes.setdefault(process, event.rank)
            elif isinstance(event, ev.WorkerStarted):
                self.launcher_ranks[event.host, event.worker_pid] = event.rank
            elif isinstance(event, ev.WorkerExited):
                self.exits[event.host, event.worker_pid] = exit_summary(event.exit_code)
            elif isinstance(event, ev.StopRequested):
                self.stops.setdefault(event.host, event.time)
        self.lanes |= self.launcher_ranks
        # those of each call of a wrapped function; at least one list
        self.calls = _calls(processes, ranks)

    def all(self, *kinds: type[E], host: str | None = None) -> list[E]:
        """The events of exactly these kinds, of all hosts or of one, by the clock of each host."""
        found = [event for kind in kinds for event in self._kinds.get((kind, host), [])]
        return found if len(kinds) == 1 else sorted(found, key=order)

    def _by_clock(self, events: Iterable[Event]) -> list[Event]:
        origins: dict[str, float] = {}
        own = []
        for event in events:
            if isinstance(event, Note) and event.name == TORN_LINE:
                self.torn.append(str(event.data.get("file", "")))
                continue
            origins[event.host] = min(event.time, origins.get(event.host, event.time))
            own.append(event)
        return sorted(
            (dataclasses.replace(each, time=each.time - origins[each.host]) for each in own),
            key=order,
        )


def order(event: Event) -> tuple[float, str, int]:
    """The order of events, which has a meaning between those of one host only."""
    return event.time, event.host, event.pid


def record(kind: type[R], event: Event, /, **values: Any) -> R:
    """A record of the report, with `values` and the fields that `event` has by the same names."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    own = {n: getattr(event, n) for n in names - values.keys() if hasattr(event, n)}
    return kind(**{"at": event.time, **own, **values})


def _calls(processes: dict[Process, list[Event]], ranks: set[Process]) -> list[list[Event]]:
    calls: dict[int, list[Event]] = defaultdict(list, {0: []})
    ends: dict[str, dict[int, float]] = defaultdict(dict)  # of each host's calls but the last

    def call_at(host: str, time: float) -> int:
        return sum(end < time for end in ends[host].values())

    for process in sorted(ranks, key=lambda process: (processes[process][0].time, process)):
        parts, host = _split(processes[process]), process[0]
        for number, part in enumerate(parts, start=call_at(host, parts[0][0].time)):
            calls[number] += part
            if part is not parts[-1]:
                ends[host][number] = max(part[-1].time, ends[host].get(number, part[-1].time))
    for process in processes.keys() - ranks:
        for event in processes[process]:
            calls[call_at(event.host, event.time)].append(event)
    return [sorted(calls[number], key=order) for number in range(max(calls) + 1)]


def _split(log: list[Event]) -> list[list[Event]]:
    """The events of one process by its calls."""
    parts: list[list[Event]] = [[]]
    iteration, completed = -1, False
    for event in log:
        if isinstance(event, ev.Assigned | ev.Entered):
            if completed or event.iteration < iteration:
                parts.append([])
                completed = False
            iteration = event.iteration
        completed = completed or isinstance(event, ev.Completed)
        parts[-1].append(event)
    return parts
