"""One member of a simulated job: the rank-local side, whose outcomes the seed decides."""

from __future__ import annotations

from typing import Any, Protocol

from outlast.clock import Clock
from outlast.coordination.ops import Link, Op, request
from outlast.coordination.records import FaultRecord
from outlast.coordination.view import ViewRecord
from outlast.errors import RankDiscarded, RestartAbort, RestartError
from outlast.inprocess.attribution import Interruption
from outlast.inprocess.recovery.contract import (
    AssignedRank,
    Interrupted,
    Limits,
    Raised,
    RecoveryState,
    Returned,
)
from outlast.inprocess.recovery.machine import Machine
from outlast.testing.minimal_host import MinimalHost
from outlast.testing.schedule import Budget, Schedule

__all__ = ["HOLD_S", "Checks", "SimulatedMember"]

# How long a restart is held for replacements, if the schedule says so. Shorter than the backstop of
# the waits: a hold whose end was to come from a member that died ends by itself first.
HOLD_S = 0.5


class Checks(Protocol):
    """What a member reports of itself, to be checked."""

    def started(self, member: SimulatedMember) -> None:
        """It has passed the barrier `start/k`."""
        ...

    def deciding(self, k: int) -> None:
        """It is about to decide the view of iteration k+1."""
        ...

    def decided(self, record: ViewRecord) -> None:
        """It follows this view."""
        ...

    def caused(self, iteration: int, cause: FaultRecord | None) -> None:
        """It names this first cause of the end of an iteration."""
        ...

    def returned(self, iteration: int, member: int) -> None:
        """It has returned from the function."""
        ...


class SimulatedMember(MinimalHost):
    """The rank-local side of a simulated member; its function is an operation whose result the
    scheduler chooses.

    Args:
        name: for traces; its token too.
        rank: it was started as.
        clock: of the simulation.
        schedule, budget: of the run.
        checks: are told what it does.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        clock: Clock,
        schedule: Schedule,
        budget: Budget,
        checks: Checks,
    ) -> None:
        self.name, self.token = name, name
        self.preferred_rank = rank
        self.clock = clock
        self.schedule, self.budget, self.checks = schedule, budget, checks
        self.grow = schedule.grow
        size = schedule.members if schedule.await_full else 0
        self.limits = Limits(120.0, 120.0, await_size=size, await_seconds=HOLD_S)
        self.machine = SimulatedMachine(self, Link(), schedule.members)
        self.iteration, self.member = -1, -1
        self.assigned: AssignedRank | None = None
        self.inside = False
        self.leaving = False
        self.given: BaseException | None = None

    async def live(self) -> Any:
        """The whole life of the member, as a session runs it."""
        value = await self.machine.run()
        await self.machine.membership.say_goodbye(self.member, self.iteration)
        return value

    def at(self, state: RecoveryState, iteration: int, member: int) -> None:
        self.iteration, self.member = iteration, member
        if state is RecoveryState.INITIALIZE:
            self.checks.started(self)
            self.inside = True
        elif state is RecoveryState.DECIDE:
            self.checks.deciding(iteration)
        elif state is RecoveryState.DONE:
            self.inside = False

    def assign(self, record: ViewRecord, member: int) -> AssignedRank:
        self.iteration = record.iteration
        self.checks.decided(record)
        self.maybe_leave("assign")
        alive = [m for m in record.slots() if m is not None]
        size = len(alive) - len(alive) % self.schedule.divisor
        rank = alive.index(member)
        if size and rank >= size:
            raise self.give(RankDiscarded(self.name))
        size = size or len(alive)
        active = max(1, size - self.schedule.reserve)
        self.assigned = AssignedRank(rank, size, rank < active)
        return self.assigned

    async def publish(self, link: Link, iteration: int) -> None:
        self.maybe_leave("publish")

    async def initialize(self, link: Link, iteration: int) -> FaultRecord | None:
        self.maybe_leave("initialize")
        if self.budget.spend("faults", 0.05):
            return self.fault(iteration, Interruption.EXCEPTION, "initialize")
        return None

    async def call(self, iteration: int) -> Returned | Raised | Interrupted:
        outcome = await request(Op("function", f"over/{iteration}"))
        if isinstance(outcome, BaseException):
            raise self.give(outcome)
        if outcome == "raise":
            return Raised(self.fault(iteration, Interruption.EXCEPTION, "function"))
        if outcome == "interrupt":
            return Interrupted()
        self.checks.returned(iteration, self.member)
        return Returned(self.name)

    async def wait_over(self, link: Link, iteration: int, timeout: float | None) -> bytes:
        if self.assigned is not None and not self.assigned.active:
            self.checks.returned(iteration, self.member)
        return await super().wait_over(link, iteration, timeout)

    async def settle(self, iteration: int) -> None:
        self.maybe_leave("finalize")
        self.inside = False

    def restarting(self, cause: FaultRecord | None, faults: list[FaultRecord]) -> None:
        self.checks.caused(self.iteration, cause)

    # -- faults ------------------------------------------------------------------------------

    def give(self, error: BaseException) -> BaseException:
        """The error that this member is to end with."""
        self.given = error
        return error

    def maybe_leave(self, where: str) -> None:
        if self.budget.spend("leaves", 0.05):
            raise self.give(RestartError(f"{self.name} {where}"))
        if self.budget.spend("aborts", 0.05):
            raise self.give(RestartAbort(f"{self.name} {where}"))


class SimulatedMachine(Machine):
    async def _leave(self, error: BaseException) -> None:
        assert isinstance(self.host, SimulatedMember)
        self.host.leaving, self.host.inside = True, False
        await super()._leave(error)
