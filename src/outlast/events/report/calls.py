"""One call of a wrapped function: the members of each iteration, its first cause, its restarts.

Times are compared within one host only. What caused the end of an iteration, and who was lost in it
and who joined, is what its members decided (`Decided`). Of an iteration that ended without a
decision, because the whole job did, the log has the faults: the first cause is then chosen from
them, in the order of their times.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import outlast.events.types as ev
from outlast.events.event import Event
from outlast.events.fault_record import ends
from outlast.events.first_cause import first_cause
from outlast.events.hung_ranks import hung_ranks
from outlast.events.report.intervals import FOREVER, Interval
from outlast.events.report.model import Cause, Party, Restart
from outlast.events.report.recoveries import measure, rank_recovery
from outlast.events.report.run import Process, Run, record
from outlast.events.restart_causes import HANGS, HUNG, JOINED, MOVED, Interruption

NO_PROGRESS = (*HANGS, Interruption.UNRESPONSIVE)
_LEAVES = (Interruption.BASE_EXCEPTION, Interruption.TERMINATED)
"""How a rank that was told to stop leaves: with `SystemExit`, or killed by the signal."""

E = TypeVar("E", bound=Event)


class Call:
    """One call of a wrapped function."""

    def __init__(self, run: Run, number: int) -> None:
        self.number, self.events = number, run.calls[number]
        self._run = run
        self.during: dict[int, list[Event]] = defaultdict(list)  # the events of each iteration
        # the members of each iteration, each with the event that assigned its rank
        self.views: dict[int, dict[int, ev.Assigned | ev.Entered]] = defaultdict(dict)
        self._tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
        self._processes: dict[int, Process] = {}
        self._firsts: dict[int, int] = {}
        self._lasts: dict[int, int] = {}
        self._faults: dict[int, list[ev.Fault]] = {}
        self._decisions: dict[int, ev.Decided] = {}
        self.completed = {e.member for e in _only(ev.Completed, self.events)}
        ranks = {(e.host, e.pid) for e in self.events if isinstance(e, ev.Assigned | ev.Entered)}
        for event in self.events:
            self.during[event.iteration].append(event)
            if isinstance(event, ev.Decided):
                self._decisions.setdefault(event.iteration, event)  # two ranks write it
            if (event.host, event.pid) in ranks and event.member >= 0:
                self._tracks[event.member, event.iteration].append(event)
                self._processes[event.member] = event.host, event.pid
            if isinstance(event, ev.Assigned | ev.Entered) and event.member >= 0:
                self.views[event.iteration].setdefault(event.member, event)
        for iteration in sorted(self.views):
            for member in self.views[iteration]:
                self._firsts.setdefault(member, iteration)
                self._lasts[member] = iteration
        ended = {event.iteration for event in self.events if isinstance(event, ev.Fault | ev.Seen)}
        self.iterations = sorted(k for k in ended | set(self.views) if k >= 0)
        """Every iteration that has events."""

    def view(self, iteration: int) -> Mapping[int, ev.Assigned | ev.Entered]:
        """The members of an iteration; empty if it was not entered."""
        return self.views.get(iteration, {})

    def world_size(self, iteration: int) -> int:
        view = self.view(iteration)
        sizes = [event.world_size for event in view.values() if isinstance(event, ev.Assigned)]
        return max(sizes, default=len(view))

    def faults(self, iteration: int) -> list[ev.Fault]:
        """The iteration's faults, first cause first; one that two processes report counts once."""
        if iteration not in self._faults:
            self._faults[iteration] = self._order_faults(iteration)
        return self._faults[iteration]

    def walls(self) -> dict[str, Interval]:
        """From the first entry into the function to the end of the call, on each host."""
        ends = self.ends()
        walls: dict[str, Interval] = {}
        for event in _only(ev.Entered, self.events):
            if event.member in self._firsts:
                walls.setdefault(event.host, (event.time, ends[event.host]))
        return walls

    def ends(self) -> dict[str, float]:
        """The last event of each host that concerns a member which took part. The launcher, and a
        process that asked to join too late, go on after the end of the call.

        The log of a job that still runs, or whose launcher was killed, ends with steps and saves.
        These carry no member, so they count for a process that is in the function.
        """
        ends: dict[str, float] = {}
        inside: set[Process] = set()
        for event in self.events:
            process = event.host, event.pid
            if event.member in self._firsts and isinstance(event, ev.Entered):
                inside.add(process)
            elif event.member in self._firsts:
                inside.discard(process)
            if event.member in self._firsts or process in inside:
                ends[event.host] = event.time
        return ends

    def begins(self, iteration: int) -> dict[str, float]:
        begins: dict[str, float] = {}
        for event in self.view(iteration).values():
            begins[event.host] = min(event.time, begins.get(event.host, event.time))
        return begins

    def lost(self, iteration: int) -> tuple[Party, ...]:
        """The members of the iteration that are in no later one: those that the others have decided
        to be out of the job, and those that left after that.
        """
        view, decided = self.view(iteration), self.decision(iteration)
        events = [*self.during.get(iteration, ()), *self.during.get(iteration + 1, ())]
        reasons = {event.member: event.reason for event in _only(ev.Lost, events)}
        kinds = {fault.member: fault.interruption for fault in self.faults(iteration)}
        ranks = {m: view[m].rank for m in reasons if self._lasts.get(m) == iteration}
        ranks |= dict(decided.lost)
        return _parties(
            Party(
                rank=rank,
                member=member,
                host=view[member].host if member in view else "",
                reason=reasons.get(member)
                or self._exit(member, iteration)
                or kinds.get(member, ""),
            )
            for member, rank in ranks.items()
        )

    def joined(self, iteration: int) -> tuple[Party, ...]:
        """The members that the decision after the iteration has admitted, and that came."""
        following = self.view(iteration + 1)
        return _parties(
            Party(rank=following[m].rank, member=m, host=following[m].host)
            for m in self.decision(iteration).joined
            if m in following
        )

    def lost_hosts(self, iteration: int) -> frozenset[str]:
        """The hosts of the iteration whose members are all in no later one."""
        lost = self.lost(iteration)
        gone = {party.member for party in lost}
        stayed = {event.host for m, event in self.view(iteration).items() if m not in gone}
        return frozenset(party.host for party in lost) - stayed

    def waiting(self) -> list[Party]:
        return [
            Party(rank=event.preferred_rank, member=event.member, host=event.host)
            for event in _only(ev.Joined, self.events)
            if event.member not in self._firsts
        ]

    def restarts(self) -> list[Restart]:
        """Every iteration that ended in a restart, or should have."""
        return [
            self._restart(iteration)
            for iteration in self.iterations
            if iteration + 1 in self.views
            or any(isinstance(event, ev.Fault | ev.Seen) for event in self.during[iteration])
            if not self._stopped(iteration)
        ]

    def _restart(self, iteration: int) -> Restart:
        view, following = self.view(iteration), self.view(iteration + 1)
        events, faults = self.during[iteration], self.faults(iteration)
        seen = _only(ev.Seen, events)
        # An overtaken exception is recorded at the end of the interrupt, not when it was raised.
        first = next((fault for fault in faults if not fault.overtaken), None)
        moments = [first] if first else [*seen, *following.values()]
        causes = [self._cause(fault) for fault in faults]
        if iteration in self._decisions and self.decision(iteration).cause is None:
            causes = []  # no rank failed: connections broke because the job grew, for example
        ranks = tuple(
            rank_recovery(view[m], self._run.lanes[self._processes[m]], self._back(m, iteration))
            for m in sorted(view.keys() & following.keys())
        )
        left = [event for event in _only(ev.Lost, events) if event.moved and not causes]
        joined = self.joined(iteration)
        grew = not causes and any(event.reason == MOVED for event in seen)
        moved = left[0].reason if left else JOINED if grew else ""
        return Restart(
            call=self.number,
            iteration=iteration,
            at=moments[0].time,
            cause=causes[0] if causes else None,
            others=tuple(causes[1:]),
            reason=seen[0].reason if seen else "",
            moved=moved,
            moved_bytes=self._moved_bytes(joined) if left else 0,
            phases=measure(ranks, first if causes else None),
            lost=self.lost(iteration),
            joined=joined,
            world_size_before=self.world_size(iteration),
            world_size_after=self.world_size(iteration + 1),
            resumed=any(
                _only(ev.Entered, self.during[i]) for i in self.iterations if i > iteration
            ),
            swallowed=tuple(event.where for event in _only(ev.InterruptSwallowed, events)),
            ranks=ranks,
        )

    def _moved_bytes(self, joined: Sequence[Party]) -> int:
        processes = {self._processes[party.member] for party in joined}
        restored = self._run.all(ev.CheckpointRestored)
        return sum(
            event.fetched_bytes
            for event in restored
            if event.source == "predecessor" and (event.host, event.pid) in processes
        )

    def _stopped(self, iteration: int) -> bool:
        """Whether the iteration ended only because ranks left when the job was told to stop."""
        stops = self._run.stops
        left = [f for f in self.faults(iteration) if not (f.consequence or f.overtaken)]
        lost = [e for e in _only(ev.Lost, self.during[iteration]) if not e.moved]
        return bool(stops and (left or lost)) and all(
            not (isinstance(event, ev.Fault) and event.interruption not in _LEAVES)
            and event.time >= stops.get(event.host, FOREVER)
            for event in (*left, *lost)
        )

    def _cause(self, fault: ev.Fault) -> Cause:
        """The fault as the report shows it, on its own host though only others reported it."""
        process = self._processes.get(fault.member, ("", -1))
        return record(
            Cause,
            fault,
            host=process[0] or fault.host,
            message=fault.cause,
            exit=self._exit(fault.member, fault.iteration),
            pid=process[1],
            launcher_rank=self._run.launcher_ranks.get(process, -1),
            idle=fault.idle if fault.interruption in NO_PROGRESS else 0.0,
        )

    def _back(self, member: int, iteration: int) -> list[Event]:
        """The events of the member's process from the end of the iteration to its next entry."""
        before = self._tracks[member, iteration]
        after = self._tracks[member, iteration + 1]
        placed = [
            i for i, event in enumerate(before) if isinstance(event, ev.Assigned | ev.Entered)
        ]
        entered = [i for i, event in enumerate(after) if isinstance(event, ev.Entered)]
        return before[placed[-1] + 1 :] + after[: entered[0] + 1 if entered else None]

    def _exit(self, member: int, iteration: int) -> str:
        """How the member's process ended if it was lost in this iteration; empty if later."""
        process = self._processes.get(member, ("", -1))
        if member in self.completed or self._lasts.get(member, iteration) > iteration:
            return ""
        # A fresh host, such as a new pod, may have the name and the process IDs of the lost one.
        # The exit is then that of the last process: no launcher was left to record the first one.
        if any(self._processes[later] == process for later in self._processes if later > member):
            return ""
        return self._run.exits.get(process, "")

    def decision(self, iteration: int) -> ev.Decided:
        """The decision after the iteration; an empty one if there was none."""
        return self._decisions.get(iteration, ev.Decided())

    def _order_faults(self, iteration: int) -> list[ev.Fault]:
        events = self.during.get(iteration, ())
        seen: dict[str, float] = {}
        for event in _only(ev.Seen, events):
            seen.setdefault(event.host, event.time)
        found = _merge_hung(_only(ev.Fault, events), seen)
        first = self._first_of(found, iteration)
        if first is None:
            return found
        rest = [fault for fault in found if fault is not first]
        # Echoes last; otherwise by time, which is meaningful within each host.
        rest.sort(key=lambda fault: fault.consequence)
        merged: dict[int, ev.Fault] = {}
        for fault in (first, *rest):
            one = fault.member >= 0 and not fault.overtaken
            merged.setdefault(fault.member if one else -2 - len(merged), fault)
        return list(merged.values())

    def _first_of(self, found: Sequence[ev.Fault], iteration: int) -> ev.Fault | None:
        """The first cause as the members decided; where they have not, or its log is missing, as
        they would have.
        """
        decided = self.decision(iteration).cause
        if decided is None:
            return first_cause(found)
        # The end of a rank may be reported twice: by itself, and then by its monitor.
        same = (
            fault
            for fault in found
            if fault.member == decided.member and fault.overtaken == decided.overtaken
            if fault.interruption == decided.interruption or (ends(fault) and ends(decided))
        )
        return next(same, first_cause(found))


def _only(kind: type[E], events: Iterable[Event]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def _parties(found: Iterable[Party]) -> tuple[Party, ...]:
    return tuple(sorted(found, key=lambda party: party.rank))


def _merge_hung(faults: Sequence[ev.Fault], seen: Mapping[str, float]) -> list[ev.Fault]:
    """The faults, with those of hung ranks reduced to one for each rank, the likely cause first.

    A rank reports its own hang after the iteration has ended. The fault therefore gets the time at
    which a monitor on the same host reported a hang, or else at which the host learned of the end.
    """
    reported = dict(seen)
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
