"""The interface between the state machine (`state_machine.py`) and its host (`rank_host.py`)."""

from __future__ import annotations

import dataclasses
import enum
from contextlib import AbstractContextManager
from typing import Any, Protocol

from outlast.clock import Clock
from outlast.coordination.decision import Decision, Rules, ViewRecord
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link
from outlast.events.emitter import Place
from outlast.events.fault_record import FaultRecord
from outlast.inprocess.timeouts import Durations


class RecoveryState(enum.Enum):
    """The states of the state machine; `state_machine.py` draws the transitions."""

    ENTER = "enter"
    JOIN = "join"
    START = "start"
    INITIALIZE = "initialize"
    RUN = "run"
    COMPLETE = "complete"
    SETTLE = "settle"
    DECIDE = "decide"
    PAUSE = "pause"
    ASSIGN = "assign"
    DONE = "done"


class GrowPolicy(enum.Enum):
    """The time at which a process that asks to join is admitted."""

    AT_ONCE = "at once"
    AT_NEXT_RESTART = "at the next restart"
    NEVER = "never"


@dataclasses.dataclass(frozen=True)
class Returned:
    """The function has returned."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Raised:
    """The function raised an `Exception`, asked for a restart, or was interrupted while raising."""

    fault: FaultRecord


@dataclasses.dataclass(frozen=True)
class Interrupted:
    """The function was left because the iteration is over."""


class Host(Protocol):
    """The rank-local side. An exception raised by one of these methods ends this member."""

    place: Place  # of this member: the machine sets iteration and member, `assign` the rest
    clock: Clock
    token: str  # of this process; it names its host (`records.process_token`)
    preferred_rank: int
    grow: GrowPolicy
    durations: Durations
    rules: Rules
    # the ranks of its host, that of the members that they succeed, and why these leave; if they do
    succeeds: tuple[range, str, str] | None

    @property
    def keeps(self) -> bool:
        """Whether this member keeps state that is to be saved before the job ends."""

    def at(self, state: RecoveryState) -> None:
        """Called before the machine enters `state`."""

    async def assign(self, link: Link, record: ViewRecord) -> None:
        """Sets rank and size of this member in the iteration: applies the rank assignment and the
        rank filter to the view; not if its members only save (`ViewRecord.saves`): then all are
        needed. `initialize` and `call` save what is kept then, instead of what the user has given.
        """

    def serve(self) -> str | None:
        """Serves the iteration's own store if this is rank 0; returns its address."""

    async def initialize(self, store: str) -> FaultRecord | None:
        """Runs initialize and the first health check; returns a fault. `store`: the iteration's."""

    async def call(self) -> Returned | Raised | Interrupted:
        """Runs the function until it is left."""

    async def wait_over(self, link: Link, timeout: float | None) -> bytes:
        """Waits until the iteration is over; `KeyTimeout` after `timeout` seconds."""

    async def settle(self) -> None:
        """Waits for the abort, releases resources, and runs finalize and the health check."""

    async def hang_report(self, membership: MembershipProtocol) -> FaultRecord | None:
        """This member's hang report, if it hung when a soft timeout ended the iteration."""

    def progress(self) -> dict[str, int]:
        """The last training step (`step`) of this iteration, and its `pings`, or 0; the fewest
        ranks with which the function may be called again (`least`), or -1 if unknown.
        """

    def fault(self, cause: str) -> FaultRecord:
        """A fault of this member that has no exception. Its event is written."""

    def fault_of(self, error: BaseException) -> FaultRecord:
        """A fault of this member from the exception that ends it."""

    def timing(self, name: str) -> AbstractContextManager[object]:
        """Measures the wait at the barrier `start` or `term`."""

    def decided(self, decision: Decision, *, reports: bool) -> None:
        """A decision: all members have left the iteration. `reports`: show it to the user."""

    def leaves_with(self, error: BaseException) -> None:
        """Called when this member ends with `error`, before the others are told."""
