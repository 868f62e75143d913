"""One member of a simulated job: what a rank does locally, as the scheduler likes it to go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from outlast.testing.bare_host import BareHost

if TYPE_CHECKING:
    from outlast.testing.world import SimulatedWorld

__all__ = ["HOLD_S", "SimulatedHost"]

# How long a restart is held for replacements, where it is. Shorter than the backstop of those that
# wait: a hold that nobody ends, since who was to end it died, is over by itself first.
HOLD_S = 0.5


class SimulatedHost(BareHost):
    """The rank-local side of a simulated member; its function is an operation that the
    scheduler ends as it likes.
    """

    def __init__(self, world: SimulatedWorld, name: str, rank: int) -> None:
        self.world, self.name = world, name
        self.clock: Clock = world.sim.clock
        self.token = name
        self.preferred_rank = rank
        self.grow = world.schedule.grow
        size = world.schedule.members if world.schedule.await_full else 0
        self.limits = Limits(120.0, 120.0, await_size=size, await_seconds=HOLD_S)
        self.machine = SimulatedMachine(self, Link(), world.schedule.members)
        self.iteration, self.member = -1, -1
        self.assigned: AssignedRank | None = None
        self.inside = False
        self.leaving = False
        self.given: BaseException | None = None

    async def live(self) -> Any:
        """The member's life, as the session has it."""
        value = await self.machine.run()
        await self.machine.membership.say_goodbye(self.member, self.iteration)
        return value

    def at(self, state: RecoveryState, iteration: int, member: int) -> None:
        self.iteration, self.member = iteration, member
        if state is RecoveryState.INITIALIZE:
            self.world.invariants.started(self)
            self.inside = True
        elif state is RecoveryState.DECIDE:
            self.world.invariants.deciding(iteration)
        elif state is RecoveryState.DONE:
            self.inside = False

    def assign(self, record: ViewRecord, member: int) -> AssignedRank:
        self.iteration = record.iteration
        self.world.invariants.decided(record)
        self.maybe_leave("assign")
        alive = [m for m in record.slots() if m is not None]
        size = len(alive) - len(alive) % self.world.schedule.divisor
        rank = alive.index(member)
        if size and rank >= size:
            raise self.give(RankDiscarded(self.name))
        size = size or len(alive)
        active = max(1, size - self.world.schedule.reserve)
        self.assigned = AssignedRank(rank, size, rank < active)
        return self.assigned

    async def publish(self, link: Link, iteration: int) -> None:
        self.maybe_leave("publish")

    async def initialize(self, link: Link, iteration: int) -> FaultRecord | None:
        self.maybe_leave("initialize")
        if self.world.spend("faults", 0.05):
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
        self.world.invariants.finished.setdefault(iteration, set()).add(self.member)
        return Returned(self.name)

    async def wait_over(self, link: Link, iteration: int, timeout: float | None) -> bytes:
        if self.assigned is not None and not self.assigned.active:
            self.world.invariants.finished.setdefault(iteration, set()).add(self.member)
        return await super().wait_over(link, iteration, timeout)

    async def settle(self, iteration: int) -> None:
        self.maybe_leave("finalize")
        self.inside = False

    def restarting(self, cause: FaultRecord | None, faults: list[FaultRecord]) -> None:
        self.world.invariants.caused(self.iteration, cause)

    # -- faults ------------------------------------------------------------------------------

    def give(self, error: BaseException) -> BaseException:
        """The error that this member is to end with."""
        self.given = error
        return error

    def maybe_leave(self, where: str) -> None:
        if self.world.spend("leaves", 0.05):
            raise self.give(RestartError(f"{self.name} {where}"))
        if self.world.spend("aborts", 0.05):
            raise self.give(RestartAbort(f"{self.name} {where}"))


class SimulatedMachine(Machine):
    async def _leave(self, error: BaseException) -> None:
        assert isinstance(self.host, SimulatedHost)
        self.host.leaving, self.host.inside = True, False
        await super()._leave(error)
