"""The record of a fault, as the ranks share it through the store and decide by it."""

from __future__ import annotations

import dataclasses
from typing import Any

from outlast.events.restart_causes import Interruption
from outlast.events.types import Fault

# The ends of a member: none of them can come before it arrives at a barrier.
_ENDS: frozenset[str] = frozenset(
    {
        Interruption.TERMINATED,
        Interruption.HARD_TIMEOUT,
        Interruption.UNRESPONSIVE,
        Interruption.BASE_EXCEPTION,
    }
)


@dataclasses.dataclass(frozen=True)
class FaultRecord:
    """A fault in one iteration, as its own process, its monitor or an observer reported it.

    `pings`, `collectives` and `groups` are the progress of the member: among hung ranks, the one
    that is furthest behind is the likely cause.
    """

    iteration: int
    member: int
    rank: int
    host: str
    pid: int
    interruption: str  # a name of `restart_causes.Interruption`
    cause: str  # one line
    traceback: str = ""  # the whole traceback, or an empty string
    consequence: bool = False  # it looks like that of another fault: a closed connection
    pings: int = 0
    collectives: int = -1  # -1 if not known
    idle: float = 0.0  # how long the member had made no progress, in seconds
    own_report: bool = False  # the hung member reports itself: it knows where it was
    where: str = ""  # the place where the exception was raised, if there was one
    permanent: str = ""  # whether a restart would raise it again: `always`, `at start`, or empty
    step: int = 0  # the last training step in this iteration; 0 if none is known
    ran: float = 0.0  # how long it had made progress since its last ping, step or entry, in seconds
    overtaken: bool = False  # see `error_kinds.overtaken`
    mistake: bool = False  # a mistake in the user's program raises such an exception
    ends_job: bool = False  # the member ends the job, and leaves once it has saved what it keeps
    made: int = -1  # of a hung rank, where its loop is: see `training_step.Loop`
    passes: int = 0
    loop_at: str = ""
    # of each process group, the last collective: see `interruption/flight_recorder`
    groups: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def may_be_harmless(self) -> bool:
        """Whether the rank may not have failed by itself."""
        return self.consequence or self.overtaken

    def event(self) -> Fault:
        values = dataclasses.asdict(self)
        # Its own pid is its writer's.
        for name in ("pid", "permanent", "step", "ran", "mistake", "ends_job"):
            del values[name]
        return Fault(**values)


def ends(fault: FaultRecord | Fault) -> bool:
    """Whether the member no longer took part after this fault."""
    return fault.interruption in _ENDS
