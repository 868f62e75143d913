"""The events of one call of a wrapper, ordered for questions: who was where, what came first.

Times are compared within one host only. Which fault came first on two hosts is told by cause and
effect instead: a host that had seen the end of the iteration before its own fault did not begin
it. Where that leaves several, they are taken in the order of their ranks.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from outlast.events.report_calls import Process, main_processes
from outlast.events.report_model import Cause, Party
from outlast.events.types import Assigned, Entered, Event, Fault, Lost, Seen, WorkerExited

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
        tracks: what each member's own process wrote, in order.
    """

    def __init__(
        self,
        number: int,
        events: Sequence[Event],
        origins: Mapping[str, float],
        exits: Mapping[Process, str],
    ) -> None:
        self.number = number
        self.events = sorted(events, key=lambda event: event.time)
        self._origins = origins
        self._exits = exits
        self._processes: dict[int, Process] = {}
        self.views: dict[int, dict[int, Assigned | Entered]] = defaultdict(dict)
        self.tracks: dict[int, list[Event]] = defaultdict(list)
        ranks = main_processes(self.events)
        for event in self.events:
            if (event.host, event.pid) in ranks and event.member >= 0:
                self.tracks[event.member].append(event)
                self._processes[event.member] = (event.host, event.pid)
            if isinstance(event, Assigned | Entered) and event.member >= 0:
                self.views[event.iteration].setdefault(event.member, event)

    def iterations(self) -> list[int]:
        """Every iteration that some event tells of."""
        ended = {event.iteration for event in self.events if isinstance(event, Fault | Seen)}
        return sorted(iteration for iteration in ended | set(self.views) if iteration >= 0)

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
        firsts = _first_seen(self.events, iteration)

        def order(fault: Fault) -> tuple[bool, bool, int]:
            return fault.consequence, firsts.get(fault.host, fault.time) < fault.time, fault.rank

        found = [e for e in self.events if isinstance(e, Fault) and e.iteration == iteration]
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
            exit=self._exit(fault.member),
            consequence=fault.consequence,
            at=self.at(fault),
        )

    def lost(self, iteration: int) -> tuple[Party, ...]:
        """Who was in the iteration and is in no later one."""
        view = self.views.get(iteration, {})
        reasons = {
            event.member: event.reason
            for event in self.events
            if isinstance(event, Lost) and event.iteration in (iteration, iteration + 1)
        }
        if self.views.get(iteration + 1):
            gone = {m for m in view if m not in self.views[iteration + 1]}
            gone = {m for m in gone if not any(m in self.views[k] for k in self._after(iteration))}
        else:
            gone = set(reasons) & set(view)
        faults = {fault.member: fault for fault in self.faults(iteration)}
        parties = []
        for member in gone:
            reason = reasons.get(member) or self._exit(member)
            if not reason and member in faults:
                reason = faults[member].interruption
            parties.append(_party(view[member], reason))
        return tuple(sorted(parties, key=lambda party: party.rank))

    def joined(self, iteration: int) -> tuple[Party, ...]:
        """Who is in the iteration after this one, and was in none before."""
        before = {m for k, view in self.views.items() if k <= iteration for m in view}
        view = self.views.get(iteration + 1, {})
        new = [_party(event, "") for member, event in view.items() if member not in before]
        return tuple(sorted(new, key=lambda party: party.rank))

    def recovery(self, member: int, iteration: int) -> list[Event]:
        """What the member's process wrote from the end of the iteration to its next entry."""
        track = self.tracks[member]
        start, end = 0, len(track)
        for index, event in enumerate(track):
            if isinstance(event, Assigned | Entered) and event.iteration == iteration:
                start = index + 1
            if isinstance(event, Entered) and event.iteration == iteration + 1:
                end = index + 1
                break
            if event.iteration > iteration + 1:
                end = index
                break
        return track[start:end]

    def _after(self, iteration: int) -> list[int]:
        return [later for later in self.views if later > iteration]

    def _exit(self, member: int) -> str:
        return self._exits.get(self._processes.get(member, ("", -1)), "")


def _first_seen(events: Iterable[Event], iteration: int) -> dict[str, float]:
    firsts: dict[str, float] = {}
    for event in events:
        if isinstance(event, Seen) and event.iteration == iteration:
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
