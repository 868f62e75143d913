"""The interface between the state machine (`machine.py`) and the rank host (`rank_host.py`)."""

from __future__ import annotations

import dataclasses
import enum
from contextlib import AbstractContextManager
from typing import Any, Protocol

from outlast.clock import Clock
from outlast.coordination.ops import Link
from outlast.coordination.records import FaultRecord
from outlast.coordination.view import ViewRecord

__all__ = [
    "GrowPolicy",
    "Host",
    "Interrupted",
    "Limits",
    "Phase",
    "Place",
    "Raised",
    "Returned",
]


class Phase(enum.Enum):
    """Where a member is."""

    ENTER = "enter"
    JOIN = "join"
    START = "start"
    INITIALIZE = "initialize"
    RUN = "run"
    COMPLETE = "complete"
    SETTLE = "settle"
    DECIDE = "decide"
    ASSIGN = "assign"
    DONE = "done"


class GrowPolicy(enum.Enum):
    """When a process that asks to join is taken in."""

    AT_ONCE = "at once"
    AT_NEXT_RESTART = "at the next restart"
    NEVER = "never"


@dataclasses.dataclass(frozen=True)
class Limits:
    """The timeouts of the machine, in seconds.

    Attributes:
        barrier: of the barriers between iterations.
        completion: from this rank's return to everybody's.
        backstop: a waiting member looks for itself this often (the pause doubles).
        await_size, await_seconds: hold a restart until there are this many members, this long.
    """

    barrier: float
    completion: float
    backstop: float = 1.0
    await_size: int = 0
    await_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Place:
    """A member's place in an iteration."""

    rank: int
    world_size: int
    active: bool = True


@dataclasses.dataclass(frozen=True)
class Returned:
    """The function has returned."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Raised:
    """The function raised an `Exception`, or asked for a restart, by itself."""

    fault: FaultRecord


@dataclasses.dataclass(frozen=True)
class Interrupted:
    """The function was left because the iteration is over."""


class Host(Protocol):
    """What is rank-local. Exceptions that these methods raise go up, and end this member."""

    clock: Clock
    token: str
    preferred_rank: int
    grow: GrowPolicy
    limits: Limits

    def at(self, phase: Phase, iteration: int, member: int) -> None:
        """The machine is about to be in `phase`."""
        ...

    def assign(self, record: ViewRecord, member: int) -> Place:
        """Works out this member's place: rank assignment and filter."""
        ...

    async def publish(self, link: Link, iteration: int) -> None:
        """Says what the others must know before they start, as the store of the iteration."""
        ...

    async def initialize(self, link: Link, iteration: int) -> FaultRecord | None:
        """Runs initialize and the health check; returns the fault if initialize raised one."""
        ...

    async def call(self, iteration: int) -> Returned | Raised | Interrupted:
        """Runs the function to its end, whatever that is."""
        ...

    async def wait_over(self, link: Link, iteration: int, timeout: float | None) -> bytes:
        """Waits until the iteration is over; `KeyTimeout` after `timeout` seconds."""
        ...

    async def settle(self, iteration: int) -> None:
        """Abort done, resources released, finalize, health check."""
        ...

    def testimony(self, iteration: int, faults: list[FaultRecord]) -> FaultRecord | None:
        """How this member was met, if it stood still while a soft timeout ended the iteration."""
        ...

    def fault(self, iteration: int, interruption: str, cause: str) -> FaultRecord:
        """A fault of this member that has no exception."""
        ...

    def fault_of(self, iteration: int, error: BaseException) -> FaultRecord:
        """A fault of this member from the exception that ends it."""
        ...

    def timing(self, name: str) -> AbstractContextManager[object]:
        """Measures the wait at a barrier: `start`, `term`."""
        ...

    def restarting(self, cause: FaultRecord | None, faults: list[FaultRecord]) -> None:
        """Everyone has left iteration k, and this is what had happened."""
        ...
