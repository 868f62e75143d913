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
      | returned (or: reserve rank)                             |
      v                                                         |
    COMPLETE --a rank failed, or the others took too long ------+
      |
      v
    DONE

There is one method per state; it makes the transition, and returns the next state
(`RecoveryState`).

SETTLE consists of: abort done, torch.distributed released, finalize, health check, barrier
`term/k`. After it, no live member is in the function at k (R2). DECIDE claims the history of
faults, which may end the job, and the view of k+1; all members use those that won (R1). PAUSE is
the back-off between equal faults. Every exception that leaves the machine is first recorded in the
ledger, so that the others continue without this member (R5): an exception on one rank never leaves
the others waiting.

The machine is a coroutine that performs no input or output. Everything rank-local (the function,
abort, finalize, ...) is done by its `Host`: `recovery/rank_host.py`, or a simulated one in
`tests/simulation`, where the same machine runs under every interleaving.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from outlast.coordination import barrier
from outlast.coordination.lost_host import enter_host
from outlast.coordination.membership import COMPLETED, RESTART, MembershipProtocol, resume_key
from outlast.coordination.ops import Link
from outlast.coordination.records import FaultRecord, LostRecord, first_cause, suspects_link
from outlast.coordination.stores.store import KeyTimeout
from outlast.coordination.view import ViewRecord
from outlast.errors import (
    InternalError,
    RankDiscarded,
    RankLostError,
    RankTimeout,
    RestartAbort,
    RestartError,
    StoreError,
    UnrecoverableFault,
)
from outlast.inprocess.attribution import Interruption
from outlast.inprocess.recovery.admission import (
    end_iteration_to_join,
    hold_for_replacements,
    wait_for_end_of_iteration,
)
from outlast.inprocess.recovery.faults.fault_history import (
    add_cause,
    agreed_faults,
    agreed_history,
    cause_of_abort,
    reporter_of,
)
from outlast.inprocess.recovery.host_protocol import (
    AssignedRank,
    GrowPolicy,
    Host,
    Raised,
    RecoveryState,
    Returned,
)


class Machine:
    """Drives one member of a job that started with `world_size` members through all iterations."""

    def __init__(self, host: Host, link: Link, world_size: int) -> None:
        self.host, self.link = host, link
        self.membership = MembershipProtocol(link, world_size)
        self.member = -1
        self.iteration = 0
        self.record = ViewRecord(0, tuple(range(world_size)))
        self.assigned = AssignedRank(host.preferred_rank, world_size)
        self.cause: FaultRecord | None = None
        self.held_in_vain: frozenset[int] = frozenset()
        self.value: Any = None
        self.pause = 0.0

    async def run(self) -> Any:
        """Runs the states until the job is done; returns the function's value."""
        transitions = {
            RecoveryState.ENTER: self._enter,
            RecoveryState.JOIN: self._join,
            RecoveryState.START: self._start,
            RecoveryState.INITIALIZE: self._initialize,
            RecoveryState.RUN: self._run,
            RecoveryState.COMPLETE: self._complete,
            RecoveryState.SETTLE: self._settle,
            RecoveryState.DECIDE: self._decide,
            RecoveryState.PAUSE: self._pause,
            RecoveryState.ASSIGN: self._assign,
        }
        state = RecoveryState.ENTER
        try:
            while state is not RecoveryState.DONE:
                self.host.at(state, self.iteration, self.member)
                state = await transitions[state]()
        except (StoreError, GeneratorExit):
            raise  # the others cannot be notified, or need not be
        except BaseException as error:
            # An error of the store must not hide this one.
            with contextlib.suppress(StoreError):
                await self._leave(error)
            raise
        self.host.at(RecoveryState.DONE, self.iteration, self.member)
        return self.value

    async def _enter(self) -> RecoveryState:
        if self.host.host_id:
            await enter_host(self.link, self.host.host_id, self.host.token)
        member = await self.membership.register(self.host.preferred_rank, self.host.token)
        if member is None:
            if self.host.grow is GrowPolicy.NEVER:
                raise RestartError(
                    f"rank {self.host.preferred_rank} was taken before, and the job takes in no "
                    f"new processes (grow policy: {self.host.grow.value})"
                )
            self.member = await self.membership.ask_to_join(
                self.host.preferred_rank, self.host.token
            )
            self.iteration = await self.membership.current()
            return RecoveryState.JOIN
        self.member = member
        return RecoveryState.ASSIGN

    async def _join(self) -> RecoveryState:
        """Waits, as a joiner, for the next view. No other member is needed: the joiner waits for
        the barrier that ends iteration k and then decides as the others do, so it is admitted even
        if all others are dead by then.
        """
        k = self.iteration
        view = await self.membership.view(k)
        if view is not None and self.member in view.expected:
            self.record = view
            await self._leave_if_stopped()
            return RecoveryState.ASSIGN
        await end_iteration_to_join(self.membership, self.host.grow, k, view)
        how, self.iteration = await wait_for_end_of_iteration(self.membership, self.host, k)
        return RecoveryState.DONE if how == COMPLETED else RecoveryState.DECIDE

    async def _start(self) -> RecoveryState:
        k, name, expected = self.iteration, f"start/{self.iteration}", self.record.expected
        rank, world_size = self.assigned.rank, self.assigned.world_size
        await barrier.arrive(
            self.link, name, self.member, expected, rank=rank, world_size=world_size
        )
        with self.host.timing("start"):
            arrived = await self._pass(name, expected)
        if self._same_view(arrived) and await self.membership.over(k) is None:
            return RecoveryState.INITIALIZE
        await self.membership.end(k, RESTART)
        return RecoveryState.SETTLE

    async def _initialize(self) -> RecoveryState:
        fault = await self.host.initialize(self.link, self.iteration)
        if fault is None:
            return RecoveryState.RUN
        await self.membership.report_fault(fault)
        return RecoveryState.SETTLE

    async def _run(self) -> RecoveryState:
        if self.assigned.rank == 0:
            # Recent iterations are kept: a joiner may still be reading their keys.
            await self.membership.forget(self.iteration - 8)
        if not self.assigned.active:
            return RecoveryState.COMPLETE
        outcome = await self.host.call(self.iteration)
        match outcome:
            case Returned(value):
                self.value = value
                return RecoveryState.COMPLETE
            case Raised(fault):
                await self.membership.report_fault(fault)
        return RecoveryState.SETTLE

    async def _complete(self) -> RecoveryState:
        k, active = self.iteration, self.assigned.active
        members, limits = self.assigned.world_size, self.host.limits
        await self.membership.finish(k, members)
        how, waited = b"", 0.0
        while not how:
            try:
                how = await self.host.wait_over(self.link, k, limits.completion if active else None)
            except KeyTimeout:
                waited += limits.completion
                idle = await self.membership.count_idle(k, 0, members)
                if not idle and waited < limits.computing:
                    continue  # one of them is at work: an evaluation on rank 0, for example
                cause = f"the other ranks did not return within {waited} s"
                fault = self.host.fault(k, Interruption.EXCEPTION, cause)
                await self.membership.report_fault(fault)
                return RecoveryState.SETTLE
        if how == COMPLETED:
            return RecoveryState.DONE
        self.value = None
        return RecoveryState.SETTLE

    async def _settle(self) -> RecoveryState:
        k, (step, pings) = self.iteration, self.host.progress()
        await self.host.settle(k)
        hang_report = self.host.testimony(k, await self.membership.faults(k))
        if hang_report is not None:
            await self.membership.report_fault(hang_report)
        most = {"step": step, "pings": pings}
        await barrier.arrive(self.link, f"term/{k}", self.member, self.record.expected, most)
        with self.host.timing("term"):
            await self._pass(f"term/{k}", self.record.expected)
        return RecoveryState.DECIDE

    async def _decide(self) -> RecoveryState:
        k = self.iteration
        faults = await agreed_faults(self.membership, k)
        await self._stop_or_pause(faults)
        ender = await self.membership.end_of_job()
        if ender is not None:
            self.cause = await cause_of_abort(self.membership, faults, self.cause)
            if self.cause is not None and self.cause.cause == ender.reason:
                self.cause = dataclasses.replace(self.cause, traceback="")  # that rank raises it
            where = self._describe_member(ender.member)
            raise RestartAbort(f"{where} ended the job: {ender.reason}")
        cause, earlier = first_cause(faults), self.cause
        self.cause = cause or earlier
        if self.host.host_id and cause is not None and suspects_link(cause):
            with self.host.timing("links"):
                await self.membership.await_links(k, cause, self.host.limits.barrier / 2)
        if self.host.limits.await_size:
            with self.host.timing("replacements"):
                self.held_in_vain = await hold_for_replacements(
                    self.membership, self.host, k, self.member, self.held_in_vain
                )
            # A live member that was mistaken for lost is replaced only once its process has ended.
            await self._leave_if_lost()
        self.record = await self.membership.propose(
            k + 1, grow=self.host.grow is not GrowPolicy.NEVER
        )
        if self.host.limits.await_size:
            await self.membership.wake_holders()
        if cause is not None and cause.may_be_harmless and self.record.joiners:
            # No rank failed: connections broke because the job was made to grow.
            cause, self.cause = None, earlier
        await self._leave_if_stopped()
        survivors = self.record.expected - {joiner.member for joiner in self.record.joiners}
        # The member that failed shows the cause; if it has ended, the first that is left does.
        failed = cause is not None and cause.member in survivors
        reporter = cause.member if cause and failed else min(survivors, default=-1)
        self.host.restarting(cause, faults, reports=reporter == self.member)
        self.iteration = k + 1
        if self.member in self.record.expected:
            pauses = self.pause and self.record.stop is None
            return RecoveryState.PAUSE if pauses else RecoveryState.ASSIGN
        await self._leave_if_lost()
        return RecoveryState.JOIN

    async def _leave_if_lost(self) -> None:
        for record in await self.membership.ledger():
            if record.member == self.member:
                raise RankLostError(f"the other ranks count this one as lost: {record.reason}")

    async def _leave_if_stopped(self) -> None:
        """Leaves if the view ends the job: all its members do, because all follow the same view."""
        if self.record.stop is not None and self.record.ends_job:
            reporter = await self.membership.reporter_of_stop(self.member)
            self.host.stopped(self.record.stop, self.cause, reporter == self.member)
            raise SystemExit(self.record.stop.exit_code)

    async def _stop_or_pause(self, faults: list[FaultRecord]) -> None:
        """Ends the job, or plans the pause, if the fault came back. Before the look at the ledger:
        there, the first member that ends the job in this way is one that ended it.
        """
        policy = self.host.limits.repeated
        history = await agreed_history(self.membership, self.iteration, faults, policy)
        if await self.membership.stop_request() is not None:
            return  # a job that stops ends with its exit code
        self.host.fault_came_back = policy is not None and history.came_back
        # Members wait for each other at the barrier that follows the pause.
        self.pause = min(history.pause, self.host.limits.barrier / 2)
        cause = history.cause
        if cause is not None:
            self.cause = cause
            reporter = await reporter_of(self.membership, cause)
            self.host.unrecoverable(cause, history.stop, reporter == self.member)
            raise UnrecoverableFault(
                f"rank {cause.rank} on {cause.host}: {cause.cause} "
                f"(the job ended after {history.stop})"
            )

    async def _pause(self) -> RecoveryState:
        """Waits before the iteration, unless a member leaves, a process asks to join, or the job is
        told to stop.
        """
        key = resume_key(self.iteration)
        try:
            await self.link.wait_for(key, self.pause)
        except KeyTimeout:
            await self.link.put(key, b"1")  # the first to have waited wakes the others
            await self.link.wait_for(key, None)
        return RecoveryState.ASSIGN

    async def _assign(self) -> RecoveryState:
        await self.host.exchange(self.link, self.record, self.member)
        self.assigned = self.host.assign(self.record, self.member)
        await self.host.publish(self.link, self.iteration)
        return RecoveryState.START

    async def _leave(self, error: BaseException) -> None:
        """Records that this member has left the job, and why."""
        self.host.leaves_with(error)
        if self.member < 0:
            return
        unrecoverable = isinstance(error, UnrecoverableFault)
        if isinstance(error, SystemExit) and not unrecoverable and await self._stop_is_done():
            await self.membership.report_lost(
                LostRecord(self.member, "the job was told to stop"), self.iteration
            )
            return
        add_cause(error, self.cause)
        lost = LostRecord(self.member, str(error), ends_job=True)
        fault: FaultRecord | None = None
        if not unrecoverable:  # its fault is on record
            discarded = isinstance(error, RankDiscarded)
            own = self.host.fault_of(self.iteration, error)
            lost = LostRecord(self.member, own.cause, discarded, isinstance(error, RestartAbort))
            fault = None if discarded else own
        await self.membership.report_lost(lost, self.iteration, fault)

    async def _stop_is_done(self) -> bool:
        """Whether this member leaves as the stop requires: that is no fault."""
        stop = await self.membership.stop_request()
        return self.record.ends_job or (stop is not None and bool(stop.done))

    async def _pass(self, name: str, expected: frozenset[int]) -> dict[int, dict[str, Any]]:
        """Waits at a barrier; returns the arrivals, the same on all members. The check after each
        pause is a backstop in case the member that should have completed the barrier dies; a
        healthy recovery never needs it.
        """
        limits, now = self.host.limits, self.host.clock.now
        deadline = now() + limits.barrier
        pause = limits.backstop
        while True:
            try:
                done = await self.link.wait_for(
                    barrier.done_key(name), max(0.0, min(pause, deadline - now()))
                )
                return barrier.summary(done)
            except KeyTimeout:
                missing = await barrier.check(self.link, name, expected)
                if missing and now() >= deadline:
                    raise RankTimeout(self._describe_missing(name, missing)) from None
                pause *= 2

    def _describe_member(self, member: int) -> str:
        slots = self.record.slots()
        return f"rank {slots.index(member)}" if member in slots else f"member {member}"

    def _describe_missing(self, name: str, missing: frozenset[int]) -> str:
        slots = self.record.slots()
        ranks = sorted(slots.index(m) for m in missing if m in slots)
        return (
            f"rank {self.assigned.rank}: barrier {name} was not passed within barrier_timeout="
            f"{self.host.limits.barrier} s: ranks {ranks} did not arrive"
        )

    def _same_view(self, arrived: dict[int, dict[str, Any]]) -> bool:
        """Checks R1: ranks dense from 0, world sizes equal. A gap is a member that was lost before
        it arrived. Two members with the same rank can only result from a wrong rank assignment.
        """
        ranks = sorted(said["rank"] for said in arrived.values())
        sizes = {said["world_size"] for said in arrived.values()}
        if len(set(ranks)) != len(ranks) or len(sizes) > 1:
            raise InternalError(
                f"the rank assignment gave ranks {ranks} and world sizes {sorted(sizes)}: "
                "it must give every rank once, and one world size, on all members"
            )
        return ranks == list(range(self.assigned.world_size))
