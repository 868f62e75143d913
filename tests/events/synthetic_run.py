"""Synthetic logs of runs: what N ranks write through iterations, faults and restarts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from outlast.events.event import Event
from outlast.events.first_cause import first_cause
from outlast.events.types import (
    AbortDone,
    Admitted,
    Assigned,
    BarrierPassed,
    Completed,
    Decided,
    Entered,
    Fault,
    FinalizeDone,
    HealthCheckDone,
    InitializeDone,
    InterruptSent,
    Joined,
    LeftFunction,
    Lost,
    Seen,
)

# Durations of the phases of a restart in seconds; exact in binary, so that sums are exact too.
ABORT = 1 / 64
INTERRUPT = 1 / 128
FINALIZE = 1 / 32
HEALTH = 1 / 256
ASSIGN = 1 / 512
SEEN = 1 / 1024
RESTART = 0.5


class SyntheticRun:
    """Writes a run. A member's process id is 1000 + its number, its monitor's 5000 + it.

    Args:
        hosts: the host of each member; its clock begins at `offsets[host]`.
    """

    def __init__(
        self, hosts: Sequence[str] = ("a",) * 4, offsets: Mapping[str, float] | None = None
    ) -> None:
        self.hosts = list(hosts)
        self.offsets = dict(offsets or {})
        self.events: list[Event] = []
        self.now = 0.0
        self.iteration = 0
        self.view = list(range(len(self.hosts)))
        self._begun = 0  # the position of the first event of the iteration

    def write(self, member: int, event: Event, at: float, *, monitor: bool = False) -> None:
        host = self.hosts[member]
        view = self.view
        rank = event.rank if event.rank >= 0 or member not in view else view.index(member)
        self.events.append(
            dataclasses.replace(
                event,
                iteration=self.iteration if event.iteration < 0 else event.iteration,
                member=member,
                rank=rank,
                host=host,
                pid=(5000 if monitor else 1000) + member,
                time=self.offsets.get(host, 0.0) + at,
            )
        )

    def begin(self, at: float) -> None:
        """Every member of the view is assigned its rank and enters."""
        self.now, self._begun = at, len(self.events)
        for member in self.view:
            size = len(self.view)
            assigned = Assigned(world_size=size, active_world_size=size, seconds=ASSIGN)
            self.write(member, assigned, at)
            self.write(member, BarrierPassed(name="start", seconds=ASSIGN), at)
            self.write(member, InitializeDone(seconds=ASSIGN), at)
            self.write(member, HealthCheckDone(seconds=HEALTH), at)
            self.write(member, Entered(), at)

    def fault(self, member: int, at: float, **fields: object) -> None:
        values = {"interruption": "EXCEPTION", "cause": "ValueError: a bad batch", **fields}
        self.write(member, Fault(**values), at)  # type: ignore[arg-type]

    def death(self, member: int, at: float) -> None:
        """The monitor's report that its main process has ended."""
        fault = Fault(interruption="TERMINATED", cause="main process ended")
        self.write(member, fault, at, monitor=True)
        self.write(member, Lost(reason="terminated"), at, monitor=True)

    def restart(
        self,
        at: float,
        lost: Sequence[int] = (),
        joiners: Sequence[str] = (),
        late: float = 0.0,
        reason: str = "fault",
    ) -> None:
        """The survivors see the fault at time `at`, restart, and enter with the joiners.

        The last survivor sees it `late` seconds after the others.
        """
        survivors = [member for member in self.view if member not in lost]
        decided = self._decided(lost, joiners)
        new = []
        for host in joiners:
            self.hosts.append(host)
            new.append(len(self.hosts) - 1)
            self.write(new[-1], Joined(iteration=self.iteration), at)
        for member in survivors:
            t = at + SEEN + (late if member == survivors[-1] else 0.0)
            self.write(member, Seen(reason=reason), t)
            self.write(member, InterruptSent(how="signal"), t)
            self.write(member, AbortDone(seconds=ABORT), t + ABORT)
            self.write(member, LeftFunction(outcome="interrupted"), t + ABORT + INTERRUPT)
            done = t + ABORT + INTERRUPT + FINALIZE
            self.write(member, FinalizeDone(seconds=FINALIZE), done)
            self.write(member, HealthCheckDone(seconds=HEALTH), done + HEALTH)
            waited = ASSIGN * (2 if member == survivors[0] else 1)
            self.write(member, BarrierPassed(name="term", seconds=waited), done + HEALTH)
            if member in survivors[:2]:
                self.write(member, decided, done + HEALTH)
        self.iteration += 1
        self.view = survivors + new
        for member in new:
            self.write(member, Admitted(seconds=0.1), at + RESTART)
        self.begin(at + RESTART)

    def _decided(self, lost: Sequence[int], joiners: Sequence[str]) -> Decided:
        """What the members decide from the faults in the order in which they were reported."""
        faults = [event for event in self.events[self._begun :] if isinstance(event, Fault)]
        reported = {fault.member for fault in faults}
        for member in set(lost) - reported:  # by the launcher of another host, to the store alone
            cause = f"host {self.hosts[member]} was lost"
            faults.append(Fault(member=member, interruption="TERMINATED", cause=cause))
        first = first_cause(faults)
        if first is not None and (first.consequence or first.overtaken) and joiners:
            first = None
        return Decided(
            cause=first,
            lost=[(member, self.view.index(member)) for member in lost],
            joined=[len(self.hosts) + n for n in range(len(joiners))],
            size=len(self.view),
            members=len(self.view) - len(lost) + len(joiners),
            reached="all arrived",
        )

    def complete(self, at: float) -> None:
        for member in self.view:
            self.write(member, LeftFunction(outcome="returned"), at)
            self.write(member, BarrierPassed(name="complete", seconds=0.0), at)
            self.write(member, Completed(), at)
