"""The recovery of one member, as an explicit state machine.

::

    ENTER --rank taken before---> JOIN <--not admitted yet--+
      |                            |  |                     |
      |                            |  +---------------------+
      v                            v
    START <- ASSIGN <- PAUSE <-- DECIDE <-- (restart) SETTLE <--+
      |                                                  ^      |
      | barrier start/k, all ranks are checked           |      |
      v                                                  |      |
    INITIALIZE --raised--> report the fault -------------+      |
      |                                                         |
      v                                                         |
    RUN --interrupted / raised---> (report the fault) ----------+
      |                                                         |
      | returned (or: reserve rank)  (saved) -------------------+
      v                                                         |
    COMPLETE --a rank failed, or the others took too long ------+
      |
      v
    DONE

There is one method per state; it makes the transition, and returns the next state
(`RecoveryState`). The methods stand in the order of a fault: RUN, SETTLE, DECIDE, PAUSE, ASSIGN,
START, INITIALIZE, and RUN again. Those of the real host stand in the same order, so the two files
side by side are the journey of an exception; each calls down only.

SETTLE consists of: abort done, torch.distributed released, finalize, health check. DECIDE records
that this member has left the iteration; the last member to do so, or whoever records the loss of
the last one, claims the decision about k+1, so it exists only when no live member is in the
function at k (R2). All others wait for it: one record with the faults so far, which may end the
job, and the view of k+1, the same for all members (R1). PAUSE is the back-off between equal faults.
If the job ends there, but members keep state that is not saved, one more iteration follows, in
which they only save it (`ViewRecord.saves`); all read the same end after that, whatever has become
of it. So a member that ends the job stays for it, if it keeps something.
Every exception that leaves the machine is first recorded in the ledger, so that the others continue
without this member (R5): an exception on one rank never leaves the others waiting.

The machine is a coroutine that performs no input or output. Everything rank-local (the function,
abort, finalize, ...) is done by its `Host`: `recovery/rank_host.py`, or a simulated one in
`tests/simulation`, where the same machine runs under every interleaving.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from outlast.coordination import barrier, moves
from outlast.coordination.decision import Decision, ViewRecord
from outlast.coordination.membership import COMPLETED, RESTART, MembershipProtocol, resume_key
from outlast.coordination.ops import Link
from outlast.coordination.records import LostRecord
from outlast.coordination.stores.store import KeyTimeout
from outlast.errors import (
    InternalError,
    RankDiscarded,
    RankFault,
    RankMoved,
    RestartAbort,
    RestartError,
    StoreError,
    UnrecoverableFault,
)
from outlast.events.fault_record import FaultRecord
from outlast.inprocess.recovery.host_protocol import (
    GrowPolicy,
    Host,
    Raised,
    RecoveryState,
    Returned,
)
from outlast.inprocess.recovery.waits import (
    end_iteration_to_join,
    leave_if_lost,
    leave_iteration,
    pass_barrier,
    wait_for_end_of_iteration,
)


class Machine:
    """Drives one member of a job that started with `world_size` members through all iterations."""

    def __init__(self, host: Host, link: Link, world_size: int) -> None:
        self.host, self.link = host, link
        self.membership = MembershipProtocol(link, world_size, host.rules)
        self.place = host.place
        self.place.iteration = 0
        self.decision = Decision(ViewRecord(0, tuple(range(world_size))))
        self.store = ""  # the address of the iteration's own store
        self.value: Any = None
        self.succeeds = -1  # as a joiner, the member whose place this one takes when it leaves
        self.given_up: tuple[RestartAbort, FaultRecord] | None = None  # this member ends the job

    @property
    def record(self) -> ViewRecord:
        return self.decision.view

    async def run(self) -> Any:
        state = RecoveryState.ENTER
        try:
            while state is not RecoveryState.DONE:
                self.host.at(state)
                try:
                    state = await getattr(self, f"_{state.value}")()
                except RestartAbort as error:
                    state = await self._give_up(error, state)
        except (StoreError, GeneratorExit):
            raise  # the others cannot be notified, or need not be
        except BaseException as error:
            end = error if self.given_up is None else self.given_up[0]
            # An error of the store must not hide this one.
            with contextlib.suppress(StoreError):
                await self._leave(end)
            if end is not error:
                raise end from end.__cause__
            raise
        self.host.at(RecoveryState.DONE)
        return self.value

    # -- the way in -------------------------------------------------------------------------------

    async def _enter(self) -> RecoveryState:
        rank, token = self.host.preferred_rank, self.host.token
        member = await self.membership.register(rank, token)
        if member is not None:
            self.place.member = member
            self.membership.follow(self.decision)
            return RecoveryState.ASSIGN
        if self.host.grow is GrowPolicy.NEVER:
            raise RestartError(
                f"rank {rank} was taken before, and the job takes in no new processes (grow "
                f"policy: {self.host.grow.value})"
            )
        ranks, host, why = self.host.succeeds or (range(0), "", "")
        if ranks:
            own = token.rpartition("/")[0]
            self.succeeds = await moves.succeeded(self.membership, rank, host, own)
        self.place.member = await self.membership.ask_to_join(rank, token, self.succeeds)
        if ranks:  # also if this rank has died: the others of its host wait for the last successor
            await moves.succeed(self.membership, ranks, host, why)
        self.place.iteration = await self.membership.current()
        return RecoveryState.JOIN

    async def _join(self) -> RecoveryState:
        """Waits, as a joiner, for the next decision. Like each process that adds a fact, it looks
        whether the decision can be made, so it is admitted even if all others are dead.
        """
        k = self.place.iteration
        decision = await self.membership.decision(k)
        if decision is not None and (decision.ends or self.place.member in decision.view.expected):
            self._follow(decision)
            return RecoveryState.ASSIGN
        view = None if decision is None else decision.view
        self.decision = decision or self.decision
        grow = self.host.grow
        if self.succeeds >= 0 and self.succeeds not in await barrier.lost_members(self.link):
            grow = GrowPolicy.AT_NEXT_RESTART
        await end_iteration_to_join(self.membership, grow, k, view, self.place.member)
        how = await wait_for_end_of_iteration(self.membership, self.host, k)
        return RecoveryState.DONE if how == COMPLETED else RecoveryState.DECIDE

    # -- an iteration: from the function through a fault to the function again -------------------

    async def _run(self) -> RecoveryState:
        if self.place.rank == 0:
            await self.link.put("current", str(self.place.iteration).encode())
        if not self.place.active:
            return RecoveryState.COMPLETE
        outcome = await self.host.call()
        match outcome:
            case Returned() if self.record.saves:
                await self.membership.end(self.place.iteration, RESTART)
            case Returned(value):
                self.value = value
                return RecoveryState.COMPLETE
            case Raised(fault):
                await self.membership.report_fault(fault)
        return RecoveryState.SETTLE

    async def _settle(self) -> RecoveryState:
        await self.host.settle()
        report = await self.host.hang_report(self.membership)
        if report is not None:
            await self.membership.report_fault(report)
        return RecoveryState.DECIDE

    async def _decide(self) -> RecoveryState:
        decision = await leave_iteration(self.membership, self.host, self.record, self.place.member)
        self._follow(decision)
        self.place.iteration = decision.view.iteration
        if self.place.member in decision.view.expected:
            return RecoveryState.PAUSE if decision.history.pause else RecoveryState.ASSIGN
        await leave_if_lost(self.membership, self.place.member)
        return RecoveryState.JOIN

    def _follow(self, decision: Decision) -> None:
        before, self.decision = self.record.slots(), decision
        self.membership.follow(decision)
        self.host.decided(decision, reports=decision.reporter == self.place.member)
        if decision.view.saves:
            return
        if self.given_up is not None and decision.ends:
            raise self.given_up[0]
        if (cause := decision.history.cause) is not None:
            raise UnrecoverableFault(
                f"rank {cause.rank} on {cause.host}: {cause.cause} "
                f"(the job ended after {decision.history.stop})"
            )
        if (ender := decision.ended_by) is not None:
            known = ender.member in before
            where = f"rank {before.index(ender.member)}" if known else f"member {ender.member}"
            raise RestartAbort(f"{where} ended the job: {ender.reason}")
        if decision.view.stop is not None and decision.ends:
            raise SystemExit(decision.view.stop.exit_code)

    async def _pause(self) -> RecoveryState:
        """Waits before the iteration, unless a member leaves, a process joins or the job stops."""
        key = resume_key(self.place.iteration)
        # Members wait for each other at the barrier that follows the pause.
        pause = min(self.decision.history.pause, self.host.durations.barrier / 2)
        try:
            await self.link.wait_for(key, pause)
        except KeyTimeout:
            await self.link.put(key, b"1")  # the first to have waited wakes the others
            await self.link.wait_for(key, None)
        return RecoveryState.ASSIGN

    async def _assign(self) -> RecoveryState:
        await self.host.assign(self.link, self.record)
        return RecoveryState.START

    async def _start(self) -> RecoveryState:
        k = self.place.iteration
        with self.host.timing("start"):
            done = await pass_barrier(
                self.link,
                self.host,
                f"start/{k}",
                self.record,
                self.place.member,
                rank=self.place.rank,
                world_size=self.place.world_size,
                store=self.host.serve(),
            )
        self.membership.started(k, done)
        values = barrier.columns(done)
        if self._same_view(values):
            self.store = values["store"][values["rank"].index(0)]
            return RecoveryState.INITIALIZE
        await self.membership.end(k, RESTART)
        return RecoveryState.SETTLE

    def _same_view(self, values: dict[str, list[Any]]) -> bool:
        """Checks R1: ranks dense from 0, world sizes equal. A gap is a member that was lost before
        it arrived; there are no values if all were. Two members with the same rank can only result
        from a wrong rank assignment.
        """
        ranks, sizes = sorted(values.get("rank", ())), set(values.get("world_size", ()))
        if len(set(ranks)) != len(ranks) or len(sizes) > 1:
            raise InternalError(
                f"the rank assignment gave ranks {ranks} and world sizes {sorted(sizes)}: "
                "it must give every rank once, and one world size, on all members"
            )
        return ranks == list(range(self.place.world_size))

    async def _initialize(self) -> RecoveryState:
        fault = await self.host.initialize(self.store)
        if fault is None:
            return RecoveryState.RUN
        await self.membership.report_fault(fault)
        return RecoveryState.SETTLE

    # -- the way out ------------------------------------------------------------------------------

    async def _complete(self) -> RecoveryState:
        k, active = self.place.iteration, self.place.active
        members, durations = self.place.world_size, self.host.durations
        await self.membership.finish(k, members)
        how, waited = b"", 0.0
        while not how:
            try:
                how = await self.host.wait_over(self.link, durations.completion if active else None)
            except KeyTimeout:
                waited += durations.completion
                idle = await self.membership.count_idle(k, 0, members)
                if not idle and waited < durations.computing:
                    continue  # one of them is at work: an evaluation on rank 0, for example
                cause = f"the other ranks did not return within {waited} s"
                fault = self.host.fault(cause)
                await self.membership.report_fault(fault)
                return RecoveryState.SETTLE
        if how == COMPLETED:
            return RecoveryState.DONE
        self.value = None
        if not active and (why := await moves.asked(self.membership, self.place.member)):
            raise RankMoved(why)
        return RecoveryState.SETTLE

    async def _give_up(self, error: RestartAbort, state: RecoveryState) -> RecoveryState:
        """This member ends the job. What it keeps is saved first: see the module."""
        in_iteration = (RecoveryState.INITIALIZE, RecoveryState.RUN, RecoveryState.SETTLE)
        if state not in in_iteration or self.record.saves or not self.host.keeps:
            raise error
        fault = self.host.fault_of(error)
        self.given_up = error, dataclasses.replace(fault, ends_job=True)
        await self.membership.report_fault(self.given_up[1])
        settled = state is RecoveryState.SETTLE
        return RecoveryState.DECIDE if settled else RecoveryState.SETTLE

    async def _leave(self, error: BaseException) -> None:
        self.host.leaves_with(error)
        if self.place.member < 0:
            return
        if isinstance(error, RankMoved):
            moved = LostRecord(self.place.member, error.reason, moved=True)
            await self.membership.report_lost(moved, self.place.iteration)
            return
        unrecoverable = isinstance(error, UnrecoverableFault)
        if isinstance(error, SystemExit) and not unrecoverable:
            stop = await self.membership.stop_request()
            if self.record.ends_job or (stop is not None and stop.done):  # then it is no fault
                lost = LostRecord(self.place.member, "the job was told to stop")
                await self.membership.report_lost(lost, self.place.iteration)
                return
        cause, ender = self.decision.last_cause, self.decision.ended_by
        if cause is not None and ender is not None and cause.cause == ender.reason:
            cause = dataclasses.replace(cause, traceback="")  # that rank raises it
        if isinstance(error, RestartError | RestartAbort) and cause and not error.__cause__:
            error.__cause__ = RankFault(
                cause.cause, rank=cause.rank, host=cause.host, remote_traceback=cause.traceback
            )
        lost = LostRecord(self.place.member, str(error), ends_job=True)
        fault: FaultRecord | None = None
        if not unrecoverable:  # its fault is on record
            discarded = isinstance(error, RankDiscarded)
            known = self.given_up
            own = known[1] if known else self.host.fault_of(error)
            lost = LostRecord(
                self.place.member, own.cause, discarded, isinstance(error, RestartAbort)
            )
            fault = None if discarded or known else own
        await self.membership.report_lost(lost, self.place.iteration, fault)
