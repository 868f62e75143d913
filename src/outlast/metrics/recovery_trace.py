"""The course of each recovery, rank by rank, for a trace: when each of its phases began and ended.

The report has only the durations, those of the slowest survivor. A trace shows every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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

_TIMED: dict[type[Event], str] = {
    AbortDone: "abort",
    FinalizeDone: "finalize",
    HealthCheckDone: "health",
    Assigned: "assign",
    InitializeDone: "init",
}
_KEPT = 1000  # recoveries that were never taken: of iterations without a restart in the report


@dataclass(frozen=True)
class Phase:
    """A phase of one rank's recovery; times are those of its host's clock."""

    name: str
    start: float
    end: float


@dataclass
class RankRecovery:
    """One rank, from when it learned that the iteration must end to its next entry.

    Attributes:
        iteration: the iteration that ended.
        rank: the rank in that iteration.
    """

    host: str
    pid: int
    iteration: int
    rank: int
    start: float
    end: float = 0.0
    phases: list[Phase] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Adds the phase that the event ends, if it ends one."""
        name = _TIMED.get(type(event), "")
        if isinstance(event, BarrierPassed):
            name = event.name
        elif isinstance(event, LeftFunction):
            aborted = [phase.end for phase in self.phases if phase.name == "abort"]
            if aborted and aborted[0] < event.time:
                self.phases.append(Phase("leave", aborted[0], event.time))
        if name:
            seconds = float(getattr(event, "seconds", 0.0))
            self.phases.append(Phase(name, event.time - seconds, event.time))


class RecoveryTracker:
    """Collects the recoveries of all ranks from their events, in the order of each process."""

    def __init__(self) -> None:
        self._ranks: set[tuple[str, int]] = set()
        self._open: dict[tuple[str, int], RankRecovery] = {}
        self._done: list[RankRecovery] = []

    def apply(self, event: Event) -> None:
        """Takes one event."""
        process = event.host, event.pid
        recovery = self._open.get(process)
        if isinstance(event, Assigned | Entered):
            # A monitor process reports faults too, but is never assigned a rank. A rank may learn
            # of a fault before it has entered the function.
            self._ranks.add(process)
        if isinstance(event, Entered) and recovery is not None:
            recovery.end = event.time
            del self._open[process]
            self._done = [*self._done[-_KEPT:], recovery]
        elif recovery is not None:
            recovery.add(event)
        elif isinstance(event, Seen | Fault) and process in self._ranks:
            self._open[process] = RankRecovery(
                event.host, event.pid, event.iteration, event.rank, event.time
            )

    def take(self, iteration: int) -> list[RankRecovery]:
        """Removes and returns the finished recoveries from the end of `iteration`, by rank."""
        taken = [each for each in self._done if each.iteration == iteration]
        self._done = [each for each in self._done if each.iteration != iteration]
        return sorted(taken, key=lambda each: each.rank)
