"""The events of one call of a wrapped function, indexed: the members of each iteration, its first
cause, the members lost and joined.

Times are compared within one host only. Which of two hosts had the first fault follows from cause
and effect instead: a host that had seen the end of the iteration before its own fault did not
cause it. If several remain, they are ordered by rank.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from outlast.events import (
    Assigned,
    Completed,
    Entered,
    Event,
    Fault,
    Lost,
    Seen,
    WorkerExited,
    WorkerStarted,
)
from outlast.events.hang_report import HUNG, hung_ranks
from outlast.events.report.history.split_calls import Process, main_processes
from outlast.events.report.intervals import Interval
from outlast.events.report.model import Cause, Party
from outlast.system.error_text import exit_summary

_HANGS = (HUNG, "HARD_TIMEOUT", "UNRESPONSIVE")


def launcher_ranks_of(events: Iterable[Event]) -> dict[Process, int]:
    """The rank of each process in the launcher's messages."""
    starts = [event for event in events if isinstance(event, WorkerStarted)]
    return {(event.host, event.worker_pid): event.rank for event in starts}


def exits_of(events: Iterable[Event]) -> dict[Process, str]:
    """How each process of the launcher ended, in words."""
    exits = {}
    for event in events:
        if isinstance(event, WorkerExited):
            exits[event.host, event.worker_pid] = exit_summary(event.exit_code)
    return exits


class CallHistory:
    """One call of a wrapped function.

    Args:
        number: the number of the call in the run, from 0.
        origins: the time of the first event of each host.
        exits: the result of `exits_of` for the whole run.
        launcher_ranks: the rank of each process in the launcher's messages.

    Attributes:
        views: the members of each iteration, each with the event that assigned its rank.
    """

    def __init__(
        self,
        number: int,
        events: Sequence[Event],
        origins: Mapping[str, float],
        exits: Mapping[Process, str],
        launcher_ranks: Mapping[Process, int],
    ) -> None:
        self.number = number
        self.events = sorted(events, key=lambda event: (event.time, event.host, event.pid))
        self._origins = origins
        self._exits = exits
        self._launcher_ranks = launcher_ranks
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
        """Every iteration that has events."""
        ended = {event.iteration for event in self.events if isinstance(event, Fault | Seen)}
        return sorted(iteration for iteration in ended | set(self.views) if iteration >= 0)

    def during(self, iteration: int) -> Sequence[Event]:
        """The events of one iteration, ordered by time."""
        return self._in_iteration.get(iteration, ())

    def at(self, event: Event) -> float:
        """Seconds from the first event of its host to `event`."""
        return event.time - self._origins.get(event.host, event.time)

    def host_of(self, member: int, default: str) -> str:
        """The host of the member; `default` if only remote observers reported it."""
        return self._processes.get(member, (default, -1))[0]

    def world_size(self, iteration: int) -> int:
        """The number of members in the iteration."""
        view = self.views.get(iteration, {})
        sizes = [event.world_size for event in view.values() if isinstance(event, Assigned)]
        return max(sizes, default=len(view))

    def survivors(self, iteration: int) -> list[int]:
        """The members of the iteration that are also in the next one."""
        here, following = self.views.get(iteration, {}), self.views.get(iteration + 1, {})
        return sorted(here.keys() & following.keys())

    def faults(self, iteration: int) -> list[Fault]:
        """The faults of the iteration, the first cause first.

        A fault that two processes report (the failed one and its monitor) counts once.
        """
        ends = [event for event in self.during(iteration) if isinstance(event, Seen)]
        firsts = {event.host: event.time for event in reversed(ends)}
        found = _merge_hung([e for e in self.during(iteration) if isinstance(e, Fault)], firsts)
        hung = [fault.member for fault in found if fault.interruption == HUNG]

        def likely(fault: Fault) -> tuple[bool, bool]:
            """As `records.first_cause`."""
            return fault.consequence or (fault.overtaken and bool(hung)), fault.overtaken

        def order(fault: Fault) -> tuple[tuple[bool, bool], bool, int, int]:
            behind = hung.index(fault.member) if fault.interruption == HUNG else -1
            late = firsts.get(fault.host, fault.time) < fault.time
            return likely(fault), late, behind, fault.rank

        heads: dict[str, list[Fault]] = defaultdict(list)
        for fault in found:  # ordered by time, which is meaningful within each host
            heads[fault.host].append(fault)
        merged: dict[int, Fault] = {}
        for host in heads:
            heads[host].sort(key=likely)
        while heads:
            host = min(heads, key=lambda name: order(heads[name][0]))
            fault = heads[host].pop(0)
            one = fault.member >= 0 and not fault.overtaken
            merged.setdefault(fault.member if one else -2 - len(merged), fault)
            if not heads[host]:
                del heads[host]
        return list(merged.values())

    def cause(self, fault: Fault) -> Cause:
        """The fault as the report shows it."""
        process = self._processes.get(fault.member, ("", -1))
        return Cause(
            rank=fault.rank,
            member=fault.member,
            host=self.host_of(fault.member, fault.host),
            interruption=fault.interruption,
            message=fault.cause,
            traceback=fault.traceback,
            exit=self._exit(fault.member, fault.iteration),
            consequence=fault.consequence,
            overtaken=fault.overtaken,
            at=self.at(fault),
            pid=process[1],
            launcher_rank=self._launcher_ranks.get(process, -1),
            idle=fault.idle if fault.interruption in _HANGS else 0.0,
            where=fault.where,
        )

    def walls(self) -> dict[str, Interval]:
        """From the first entry into the function to the end of the call, on each host."""
        entries = [
            event
            for event in reversed(self.events)
            if isinstance(event, Entered) and event.member in self._firsts
        ]
        ends = self.ends()
        return {event.host: (event.time, ends[event.host]) for event in entries}

    def ends(self) -> dict[str, float]:
        """The last event of each host that concerns a member which took part. The launcher, and a
        process that asked to join too late, go on after the end of the call.

        The log of a job that still runs, or whose launcher was killed, ends with steps and saves.
        These carry no member, so they count for a process that is in the function.
        """
        ends: dict[str, float] = {}
        inside: set[Process] = set()
        for event in self.events:
            process = (event.host, event.pid)
            if event.member in self._firsts:
                (inside.add if isinstance(event, Entered) else inside.discard)(process)
            if event.member in self._firsts or process in inside:
                ends[event.host] = event.time
        return ends

    def begins(self, iteration: int) -> dict[str, float]:
        """When each host was assigned its ranks in the iteration."""
        view = self.views.get(iteration, {}).values()
        latest_first = sorted(view, key=lambda event: -event.time)
        return {event.host: event.time for event in latest_first}

    def lost(self, iteration: int) -> tuple[Party, ...]:
        """The members of the iteration that are in no later one."""
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
            seen = faults[member].interruption if member in faults else ""
            parties.append(_party(view[member], reason or seen))
        return tuple(sorted(parties, key=lambda party: party.rank))

    def lost_hosts(self, iteration: int) -> frozenset[str]:
        """The hosts of the iteration whose members are all in no later one."""
        lost = self.lost(iteration)
        gone = {party.member for party in lost}
        stayed = {e.host for m, e in self.views.get(iteration, {}).items() if m not in gone}
        return frozenset(party.host for party in lost) - stayed

    def joined(self, iteration: int) -> tuple[Party, ...]:
        """The members of the next iteration that were in none before."""
        view = self.views.get(iteration + 1, {})
        new = [_party(view[member], "") for member in view if self._firsts[member] > iteration]
        return tuple(sorted(new, key=lambda party: party.rank))

    def recovery(self, member: int, iteration: int) -> list[Event]:
        """The events of the member's process from the end of the iteration to its next entry."""
        before = self._tracks[member, iteration]
        after = self._tracks[member, iteration + 1]
        placed = [i for i, event in enumerate(before) if isinstance(event, Assigned | Entered)]
        entered = [i for i, event in enumerate(after) if isinstance(event, Entered)]
        return before[placed[-1] + 1 :] + after[: entered[0] + 1 if entered else None]

    def _exit(self, member: int, iteration: int) -> str:
        """How the member's process ended if it was lost in this iteration; empty if later."""
        process = self._processes.get(member, ("", -1))
        if member in self._completed or self._lasts.get(member, iteration) > iteration:
            return ""
        # A fresh host, such as a new pod, may have the name and the process IDs of the lost one.
        # The exit is then that of the last process: no launcher was left to record the first one.
        if any(self._processes[later] == process for later in self._processes if later > member):
            return ""
        return self._exits.get(process, "")


def _party(event: Assigned | Entered, reason: str) -> Party:
    return Party(rank=event.rank, member=event.member, host=event.host, reason=reason)


def _merge_hung(faults: Sequence[Fault], firsts: Mapping[str, float]) -> list[Fault]:
    """The faults, with those of hung ranks reduced to one for each rank, the likely cause first.

    A rank reports its own hang after the iteration has ended. The fault therefore gets the time at
    which a monitor on the same host reported a hang, or else at which the host learned of the end.
    """
    reported = dict(firsts)
    for fault in faults:
        if fault.interruption == HUNG:
            reported[fault.host] = min(fault.time, reported.get(fault.host, fault.time))
    hung = [
        dataclasses.replace(fault, time=min(fault.time, reported[fault.host]))
        for fault in hung_ranks(faults)
    ]
    first = next((i for i, fault in enumerate(faults) if fault.interruption == HUNG), 0)
    rest = [fault for fault in faults[first:] if fault.interruption != HUNG]
    return [*faults[:first], *hung, *rest]
