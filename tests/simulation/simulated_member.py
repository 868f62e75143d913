"""One member of a simulated job: the rank-local side, whose outcomes the seed decides."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

from outlast.clock import Clock
from outlast.coordination.decision import Decision, Rules, ViewRecord
from outlast.coordination.membership import MOVED
from outlast.coordination.ops import Link, Op, request
from outlast.coordination.records import lines
from outlast.coordination.repeated_faults import RepeatedFaults
from outlast.errors import RankDiscarded, RankMoved, RestartAbort, RestartError
from outlast.events.emitter import Place
from outlast.events.fault_record import FaultRecord
from outlast.inprocess.recovery.host_protocol import (
    GrowPolicy,
    Interrupted,
    Raised,
    RecoveryState,
    Returned,
)
from outlast.inprocess.recovery.state_machine import Machine
from outlast.inprocess.timeouts import Timeouts
from simulation.fault_budget import Budget, Schedule
from simulation.minimal_host import MinimalHost

if TYPE_CHECKING:
    from simulation.invariants import Invariants
    from simulation.simulated_moves import SimulatedMoves

# How long a restart is held for replacements, if the schedule says so. Shorter than the backstop of
# the waits: a hold whose end was to come from a member that died ends by itself first.
HOLD_S = 0.5
STOPPED = 143  # the exit code of a job that was told to stop
PAUSE_S = 0.25  # between equal faults


def rules_of(schedule: Schedule) -> Rules:
    """The rules of all members of a schedule, and of their monitors."""
    repeated = None
    if schedule.max_equal:
        repeated = RepeatedFaults(schedule.max_equal, backoff=PAUSE_S, max_backoff=PAUSE_S)
    size = schedule.members if schedule.await_full else 0
    return Rules(schedule.grow is not GrowPolicy.NEVER, repeated, size)


@dataclasses.dataclass(frozen=True)
class AssignedRank:
    """The rank of a member in one iteration."""

    rank: int
    world_size: int
    active: bool
    actives: int  # how many are active


class SimulatedMember(MinimalHost):
    """The rank-local side of a simulated member; its function is an operation whose result the
    scheduler chooses.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        clock: Clock,
        schedule: Schedule,
        budget: Budget,
        invariants: Invariants,
        moves: SimulatedMoves,
        succeeds: tuple[range, str, str] | None,
    ) -> None:
        self.moves, self.succeeds = moves, succeeds
        self.name, self.token, self.host_id = name, name, ""
        self.preferred_rank, self.clock, self.grow = rank, clock, schedule.grow
        self.schedule, self.budget, self.invariants = schedule, budget, invariants
        self.durations = dataclasses.replace(Timeouts().in_seconds(), hold=HOLD_S)
        self.rules = rules_of(schedule)
        self.place = Place()
        self.machine = _Machine(self, Link(), schedule.members)
        self.iteration, self.member = -1, -1
        self.assigned: AssignedRank | None = None
        self.inside = self.leaving = False
        self.given: BaseException | None = None
        self.keeps = random.Random(f"{name} of {schedule}").random() < schedule.p_keeps

    async def live(self) -> Any:
        """The whole life of the member, as a session runs it."""
        value = await self.machine.run()
        await self.machine.membership.say_goodbye(self.member, self.iteration)
        return value

    def at(self, state: RecoveryState) -> None:
        self.iteration, self.member = self.place.iteration, self.place.member
        if state is RecoveryState.INITIALIZE:
            self.invariants.started(self)
            self.inside = True
        elif state is RecoveryState.DONE:
            self.inside = False

    async def assign(self, link: Link, record: ViewRecord) -> None:
        self.iteration, member = record.iteration, self.place.member
        self.invariants.decided(record)
        self.maybe_leave("assign")
        alive = [m for m in record.slots() if m is not None]
        size = len(alive) - len(alive) % self.schedule.divisor
        rank = alive.index(member)
        if record.saves:
            self.invariants.must(self.keeps, f"R5: {self.name} is to save, and keeps nothing")
            self._assign(rank, len(alive), len(alive))
            return
        if size and rank >= size:
            raise self.give(RankDiscarded(self.name))
        size = size or len(alive)
        active = max(1, size - self.schedule.reserve)
        self._assign(rank, size, active)

    def _assign(self, rank: int, size: int, actives: int) -> None:
        active = rank < actives
        self.assigned = AssignedRank(rank, size, active, actives)
        self.place.rank, self.place.world_size, self.place.active = rank, size, active

    def serve(self) -> str | None:
        self.maybe_leave("serve")
        return self.name if self.assigned is not None and self.assigned.rank == 0 else None

    async def initialize(self, store: str) -> FaultRecord | None:
        if self.machine.record.saves:
            return None
        self.maybe_leave("initialize")
        if self.budget.spend("faults", 0.05):
            return self.fault("initialize")
        if self.assigned is not None and not self.assigned.active:
            self.invariants.returned(
                self.iteration, self.member
            )  # a reserve does not call the function
        return None

    async def call(self) -> Returned | Raised | Interrupted:
        iteration, record = self.iteration, self.machine.record
        if self.assigned is not None and self.assigned.rank == 0:  # as its monitor does, later
            await self.machine.membership.forget_before(iteration)
            if self.schedule.moves and record.stop is None and not record.saves:
                self.moves.watch(self)
        try:
            outcome = "step"
            while outcome == "step":
                outcome = await request(Op("function", f"over/{iteration}"))
            if outcome == "move":
                return await self._move(iteration)
        finally:
            self.moves.end_watch(self)
        if isinstance(outcome, BaseException):
            raise self.give(outcome)
        if outcome == "raise":
            return Raised(self.fault("function"))
        if outcome == "interrupt":
            if self.budget.spend("faults", 0.2):
                fault = self.fault("in a finally")
                return Raised(dataclasses.replace(fault, overtaken=True))
            return Interrupted()
        if record.saves:
            self.invariants.saved.add(self.member)
            return Returned(None)
        if record.stop is not None:  # as `Job` does, after its last save
            await self.machine.membership.finish_stop("saved")
            raise self.give(SystemExit(STOPPED))
        self.invariants.returned(iteration, self.member)
        return Returned(self.name)

    async def _move(self, iteration: int) -> Interrupted:
        """After the agreed step, as `elastic.leaving.leave`."""
        link = self.machine.link
        [wanted] = lines(await link.read(f"agreed/{iteration}"))
        await link.add(f"exchange/{iteration}", 1)
        if await request(Op("exchange", f"exchange/{iteration}")):
            if self.member in wanted["members"]:
                raise self.give(RankMoved(wanted["reason"]))
            assert self.assigned is not None
            started = self.machine.membership.roster(self.machine.decision)
            ranks, _ = await started
            leave = {ranks[rank] for rank in range(self.assigned.actives)} & {*wanted["members"]}
            if not leave and self.place.rank == 0:
                await self.machine.membership.end(iteration, MOVED)
            await link.wait_for(f"over/{iteration}", None)
        return Interrupted()

    async def settle(self) -> None:
        self.inside = False
        self.maybe_leave("finalize")

    def decided(self, decision: Decision, *, reports: bool) -> None:
        k, ended = decision.view.iteration - 1, decision.history.cause
        self.invariants.ends(decision)
        if ended is not None and decision.ends:
            self.invariants.stopped(k, ended, reports)
        elif not decision.ends_job:
            self.invariants.caused(k, decision.cause)

    def give(self, error: BaseException) -> BaseException:
        """The error that this member is to end with."""
        self.given = error
        return error

    def maybe_leave(self, where: str) -> None:
        if self.budget.spend("leaves", 0.05):
            raise self.give(RestartError(f"{self.name} {where}"))
        if self.budget.spend("aborts", 0.05):
            raise self.give(RestartAbort(f"{self.name} {where}"))


class _Machine(Machine):
    async def _leave(self, error: BaseException) -> None:
        assert isinstance(self.host, SimulatedMember)
        self.host.leaving, self.host.inside = True, False
        await super()._leave(error)
