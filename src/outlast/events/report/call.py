"""The events of one call of a wrapper, ordered for questions: who was where, what came first.

Times are compared within one host only. Which fault came first on two hosts is told by cause and
effect instead: a host that had seen the end of the iteration before its own fault did not begin
it. Where that leaves several, they are taken in the order of their ranks.
"""

from __future__ import annotations

import dataclasses
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from outlast.events.culprit import HUNG, hung_ranks
from outlast.events.report.model import Cause, Party
from outlast.events.report.split_calls import Process, main_processes
from outlast.events.types import (
    Assigned,
    Completed,
    Entered,
    Event,
    Fault,
    Lost,
    Seen,
    WorkerExited,
)

__all__ = ["Call", "exits_of"]


def exits_of(events: Iterable[Event]) -> dict[Process, str]:
    """How the launcher saw processes end, in words."""
    return {
        (event.host, event.worker_pid): _exit_words(event.exit_code)
        for event in events
        if isinstance(event, WorkerExited)
    }


class Call:
    """One call of a wrapper.

    Args:
        events: of this call.
        origins: the time of the first event of each host.
        exits: what `exits_of` tells of the whole run.

    Attributes:
        views: the members of each iteration, with the event that gave each its place.
    """

    def __init__(
        self,
        number: int,
        events: Sequence[Event],
        origins: Mapping[str, float],
        exits: Mapping[Process, str],
    ) -> None:
        self.number = number
        self.events = sorted(events, key=lambda event: (event.time, event.host, event.pid))
        self._origins = origins
        self._exits = exits
        self._processes: dict[int, Process] = {}
        self.views: dict[int, dict[int, Assigned | Entered]] = defaultdict(dict)
        self._in_iteration: dict[int, list[Event]] = defaultdict(list)
        self._tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
        self._firsts: dict[int, int] = {}
        self._lasts: dict[int, int] = {}
        self._completed = {event.member for event in events if isinstance(event, Completed)}
        ranks = main_processes(self.events)
        for event in self.events:
            self._in_iteration[event.iteration].append(event)
            if (event.host, event.pid) in ranks and event.member >= 0:
                self._tracks[event.member, event.iteration].append(event)
                self._processes[event.member] = (event.host, event.pid)
            if isinstance(event, Assigned | Entered) and event.member >= 0:
                self.views[event.iteration].setdefault(event.member, event)
        for iteration in sorted(self.views):
            for member in self.views[iteration]:
                self._firsts.setdefault(member, iteration)
                self._lasts[member] = iteration

    def iterations(self) -> list[int]:
        """Every iteration that some event tells of."""
        ended = {event.iteration for event in self.events if isinstance(event, Fault | Seen)}
        return sorted(iteration for iteration in ended | set(self.views) if iteration >= 0)

    def during(self, iteration: int) -> Sequence[Event]:
        """The events of one iteration, in the order of time."""
        return self._in_iteration.get(iteration, ())

    def at(self, event: Event) -> float:
        """Seconds from the first event of the host until `event`."""
        return event.time - self._origins.get(event.host, event.time)

    def host_of(self, member: int, default: str) -> str:
        """Where the member runs; a remote observer of its death does not know."""
        return self._processes.get(member, (default, -1))[0]

    def world_size(self, iteration: int) -> int:
        """How many members the iteration has."""
        view = self.views.get(iteration, {})
        told = [event.world_size for event in view.values() if isinstance(event, Assigned)]
        return max(told, default=len(view))

    def survivors(self, iteration: int) -> list[int]:
        """The members of the iteration that are in the next one too."""
        following = self.views.get(iteration + 1, {})
        return sorted(member for member in self.views.get(iteration, {}) if member in following)

    def faults(self, iteration: int) -> list[Fault]:
        """The faults of the iteration, the first cause first.

        A fault that two processes report, the failed one and its monitor, counts once.
        """
        firsts = _first_seen(self.during(iteration))
        found = _hung_at_once([e for e in self.during(iteration) if isinstance(e, Fault)], firsts)
        hung = [fault.member for fault in found if fault.interruption == HUNG]

        def order(fault: Fault) -> tuple[bool, bool, int, int]:
            behind = hung.index(fault.member) if fault.interruption == HUNG else -1
            late = firsts.get(fault.host, fault.time) < fault.time
            return fault.consequence, late, behind, fault.rank

        heads: dict[str, list[Fault]] = defaultdict(list)
        for fault in found:  # in the order of time, which holds within each host
            heads[fault.host].append(fault)
        merged: dict[int, Fault] = {}
        for host in heads:
            heads[host].sort(key=lambda fault: fault.consequence)
        while heads:
            host = min(heads, key=lambda name: order(heads[name][0]))
            fault = heads[host].pop(0)
            merged.setdefault(fault.member if fault.member >= 0 else -2 - len(merged), fault)
            if not heads[host]:
                del heads[host]
        return list(merged.values())

    def cause(self, fault: Fault) -> Cause:
        """What the report says of a fault."""
        return Cause(
            rank=fault.rank,
            member=fault.member,
            host=self.host_of(fault.member, fault.host),
            interruption=fault.interruption,
            message=fault.cause,
            traceback=fault.traceback,
            exit=self._exit(fault.member, fault.iteration),
            consequence=fault.consequence,
            at=self.at(fault),
        )

    def lost(self, iteration: int) -> tuple[Party, ...]:
        """Who was in the iteration and is in no later one."""
        view = self.views.get(iteration, {})
        reasons = {
            event.member: event.reason
            for event in (*self.during(iteration), *self.during(iteration + 1))
            if isinstance(event, Lost)
        }
        if self.views.get(iteration + 1):
            gone = {member for member in view if self._lasts[member] == iteration}
        else:
            gone = set(reasons) & set(view)
        faults = {fault.member: fault for fault in self.faults(iteration)}
        parties = []
        for member in gone:
            reason = reasons.get(member) or self._exit(member, iteration)
            if not reason and member in faults:
                reason = faults[member].interruption
            parties.append(_party(view[member], reason))
        return tuple(sorted(parties, key=lambda party: party.rank))

    def joined(self, iteration: int) -> tuple[Party, ...]:
        """Who is in the iteration after this one, and was in none before."""
        view = self.views.get(iteration + 1, {})
        new = [_party(view[member], "") for member in view if self._firsts[member] > iteration]
        return tuple(sorted(new, key=lambda party: party.rank))

    def recovery(self, member: int, iteration: int) -> list[Event]:
        """What the member's process wrote from the end of the iteration to its next entry."""
        before = self._tracks[member, iteration]
        after = self._tracks[member, iteration + 1]
        placed = [i for i, event in enumerate(before) if isinstance(event, Assigned | Entered)]
        entered = [i for i, event in enumerate(after) if isinstance(event, Entered)]
        return before[placed[-1] + 1 :] + after[: entered[0] + 1 if entered else None]

    def _exit(self, member: int, iteration: int) -> str:
        """How the member's process ended, if it was lost there; else its end came later."""
        if member in self._completed or self._lasts.get(member, iteration) > iteration:
            return ""
        return self._exits.get(self._processes.get(member, ("", -1)), "")


def _first_seen(events: Iterable[Event]) -> dict[str, float]:
    firsts: dict[str, float] = {}
    for event in events:
        if isinstance(event, Seen):
            firsts.setdefault(event.host, event.time)
    return firsts


def _party(event: Assigned | Entered, reason: str) -> Party:
    return Party(rank=event.rank, member=event.member, host=event.host, reason=reason)


def _exit_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _hung_at_once(faults: Sequence[Fault], firsts: Mapping[str, float]) -> list[Fault]:
    """The faults, with those of hung ranks made one a rank, the likely culprit first.

    A rank tells of its hang after the iteration has ended; the time of the fault is that at which
    a monitor of the same host reported a hang, or else that at which the host knew of the end.
    """
    reported = dict(firsts)
    for fault in faults:
        if fault.interruption == HUNG:
            reported[fault.host] = min(fault.time, reported.get(fault.host, fault.time))
    hung = [
        dataclasses.replace(fault, time=min(fault.time, reported[fault.host]))
        for fault in hung_ranks(faults)
    ]
    kept: list[Fault] = []
    for fault in faults:
        if fault.interruption != HUNG:
            kept.append(fault)
        else:
            kept += hung
            hung = []
    return kept
