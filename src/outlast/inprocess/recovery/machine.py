"""The recovery of one member, as an explicit state machine.

::

    ENTER --place taken before--> JOIN <--not admitted yet--+
      |                            |  |                     |
      |                            |  +---------------------+
      v                            v
    START <---------- ASSIGN <-- DECIDE <-- (restart) SETTLE <--+
      |                                                  ^      |
      | barrier start/k, everybody's place is checked    |      |
      v                                                  |      |
    INITIALIZE --raised--> report the fault -------------+      |
      |                                                         |
      v                                                         |
    RUN --interrupted / raised---> (report the fault) ----------+
      |                                                         |
      | returned (or: reserve rank)                             |
      v                                                         |
    COMPLETE --somebody failed, or the others took too long ----+
      |
      v
    DONE

One method a transition; each returns the next state. SETTLE is: abort done, torch.distributed
released, finalize, health check, barrier `term/k`: from then on no live member is in the function
at k (R2). DECIDE claims the view of k+1 (R1: all members work from the one that won). Whatever
goes up out of the machine is first recorded in the ledger, so that the others go on without this
member (R5); an exception on one rank never leaves the others waiting.

The machine is a coroutine without input or output of its own: what is rank-local (the function,
abort, finalize, ...) is the `Host`'s business. The real host is `recovery/rank_host.py`; the
simulation in `membership.py` runs the same machine.
"""

from __future__ import annotations

import contextlib
from typing import Any

from outlast.coordination import barrier
from outlast.coordination.membership import COMPLETED, RESTART, MembershipProtocol
from outlast.coordination.ops import Link
from outlast.coordination.records import FaultRecord, LostRecord, ends, first_cause
from outlast.coordination.stores.store import KeyTimeout
from outlast.coordination.view import ViewRecord
from outlast.errors import (
    InternalError,
    RankDiscarded,
    RankFault,
    RankLostError,
    RestartAbort,
    RestartError,
    StoreError,
    TimeoutError,
)
from outlast.inprocess.recovery.contract import (
    GrowPolicy,
    Host,
    Phase,
    Place,
    Raised,
    Returned,
)

__all__ = ["Machine"]


class Machine:
    """Takes one member through the job.

    Args:
        host: the rank-local side.
        link: the store, with the prefix of the call.
        world_size: how many members the job started with.
    """

    def __init__(self, host: Host, link: Link, world_size: int) -> None:
        self.host = host
        self.link = link
        self.membership = MembershipProtocol(link, world_size)
        self.member = -1
        self.iteration = 0
        self.record = ViewRecord(0, tuple(range(world_size)))
        self.place = Place(host.preferred_rank, world_size)
        self.cause: FaultRecord | None = None
        self.value: Any = None

    async def run(self) -> Any:
        """Goes through the states until the job is done; returns the function's value."""
        transitions = {
            Phase.ENTER: self._enter,
            Phase.JOIN: self._join,
            Phase.START: self._start,
            Phase.INITIALIZE: self._initialize,
            Phase.RUN: self._run,
            Phase.COMPLETE: self._complete,
            Phase.SETTLE: self._settle,
            Phase.DECIDE: self._decide,
            Phase.ASSIGN: self._assign,
        }
        phase = Phase.ENTER
        try:
            while phase is not Phase.DONE:
                self.host.at(phase, self.iteration, self.member)
                phase = await transitions[phase]()
        except (StoreError, GeneratorExit):
            raise  # nobody can be told, or nobody is to be told
        except BaseException as error:
            # A store that is gone by now must not hide what is raised.
            with contextlib.suppress(StoreError):
                await self._leave(error)
            raise
        self.host.at(Phase.DONE, self.iteration, self.member)
        return self.value

    # -- transitions -------------------------------------------------------------------------

    async def _enter(self) -> Phase:
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
            return Phase.JOIN
        self.member = member
        return Phase.ASSIGN

    async def _join(self) -> Phase:
        """Waits for the next view. The newcomer needs nobody's help for it: it waits for the
        barrier that ends iteration k and then decides as the others do, so that it comes in even
        when all others are dead by then.
        """
        k = self.iteration
        view = await self.membership.view(k)
        if view is not None and self.member in view.expected:
            self.record = view
            return Phase.ASSIGN
        left = view is None or await barrier.check(self.link, f"term/{k}", view.expected)
        if self.host.grow is GrowPolicy.AT_ONCE or not left:
            await self.membership.end(k, RESTART)
        if await self._wait_end_of_others(k) == COMPLETED:
            return Phase.DONE
        return Phase.DECIDE

    async def _start(self) -> Phase:
        k, place = self.iteration, self.place
        name = f"start/{k}"
        await barrier.arrive(
            self.link,
            name,
            self.member,
            self.record.expected,
            rank=place.rank,
            world_size=place.world_size,
        )
        with self.host.timing("start"):
            await self._pass(name, self.record.expected)
        arrived = await barrier.arrivals(self.link, name)
        if self._same_view(arrived) and await self.membership.over(k) is None:
            return Phase.INITIALIZE
        await self.membership.end(k, RESTART)
        return Phase.SETTLE

    async def _initialize(self) -> Phase:
        fault = await self.host.initialize(self.link, self.iteration)
        if fault is None:
            return Phase.RUN
        await self.membership.report_fault(fault)
        return Phase.SETTLE

    async def _run(self) -> Phase:
        if self.place.rank == 0:
            # Not the last few: a newcomer may still be reading what it found there.
            await self.membership.forget(self.iteration - 8)
        if not self.place.active:
            return Phase.COMPLETE
        outcome = await self.host.call(self.iteration)
        match outcome:
            case Returned(value):
                self.value = value
                return Phase.COMPLETE
            case Raised(fault):
                await self.membership.report_fault(fault)
        return Phase.SETTLE

    async def _complete(self) -> Phase:
        k, active = self.iteration, self.place.active
        await self.membership.finish(k, self.place.world_size)
        try:
            how = await self.host.wait_over(
                self.link, k, self.host.limits.completion if active else None
            )
        except KeyTimeout:
            cause = f"the other ranks did not return within {self.host.limits.completion} s"
            await self.membership.report_fault(self.host.fault(k, "EXCEPTION", cause))
            return Phase.SETTLE
        if how == COMPLETED:
            return Phase.DONE
        self.value = None
        return Phase.SETTLE

    async def _settle(self) -> Phase:
        k = self.iteration
        await self.host.settle(k)
        told = self.host.testimony(k, await self.membership.faults(k))
        if told is not None:
            await self.membership.report_fault(told)
        await barrier.arrive(self.link, f"term/{k}", self.member, self.record.expected)
        with self.host.timing("term"):
            await self._pass(f"term/{k}", self.record.expected)
        return Phase.DECIDE

    async def _decide(self) -> Phase:
        k = self.iteration
        faults = await self._faults(k)
        ender = await self.membership.end_of_job()
        if ender is None:
            self.cause = first_cause(faults) or self.cause
        else:
            # That a member gave up is no cause, if there is one that it gave up because of.
            enders = {record.member for record in await self.membership.ledger() if record.ends_job}
            causes = [f for f in faults if f.member not in enders]
            self.cause = first_cause(causes) or self.cause or first_cause(faults)
            raise RestartAbort(f"member {ender.member} ended the job: {ender.reason}")
        if self.host.limits.await_size:
            await self._await_replacements()
        self.record = await self.membership.propose(
            k + 1, grow=self.host.grow is not GrowPolicy.NEVER
        )
        if self.host.limits.await_size:
            await self.membership.wake_holders()
        cause = first_cause(faults)
        if cause is not None and cause.consequence and self.record.joiners:
            cause = None  # nobody failed: what broke, broke because the job was made to grow
        self.host.restarting(cause, faults)
        self.iteration = k + 1
        if self.member in self.record.expected:
            return Phase.ASSIGN
        if self.member in await barrier.lost_members(self.link):
            reason = next(
                r.reason for r in await self.membership.ledger() if r.member == self.member
            )
            raise RankLostError(f"the other ranks went on without this one: {reason}")
        return Phase.JOIN

    async def _assign(self) -> Phase:
        self.place = self.host.assign(self.record, self.member)
        await self.host.publish(self.link, self.iteration)
        return Phase.START

    # -- parts of transitions ----------------------------------------------------------------

    async def _leave(self, error: BaseException) -> None:
        """Records that this member is out, with what made it leave."""
        if self.member < 0:
            return
        discarded = isinstance(error, RankDiscarded)
        cause = None if self.cause is None else self.cause
        if (
            cause is not None
            and error.__cause__ is None
            and isinstance(error, RestartError | RestartAbort)
        ):
            error.__cause__ = RankFault(
                cause.cause, rank=cause.rank, host=cause.host, remote_traceback=cause.traceback
            )
        fault = self.host.fault_of(self.iteration, error)
        await self.membership.report_lost(
            LostRecord(self.member, fault.cause, discarded, isinstance(error, RestartAbort)),
            self.iteration,
            None if discarded else fault,
        )

    async def _pass(self, name: str, expected: frozenset[int]) -> None:
        """Waits at a barrier. The pause between own looks is a backstop against the death of
        whoever should have completed it; a healthy recovery never gets to it.
        """
        limits, now = self.host.limits, self.host.clock.now
        deadline = now() + limits.barrier
        pause = limits.backstop
        while True:
            try:
                await self.link.wait_for(
                    barrier.done_key(name), max(0.0, min(pause, deadline - now()))
                )
                return
            except KeyTimeout:
                missing = await barrier.check(self.link, name, expected)
                if missing and now() >= deadline:
                    raise TimeoutError(await self._who_is_missing(name, missing)) from None
                pause *= 2

    async def _who_is_missing(self, name: str, missing: frozenset[int]) -> str:
        slots = self.record.slots()
        ranks = sorted(slots.index(m) for m in missing if m in slots)
        return (
            f"rank {self.place.rank}: barrier {name} was not passed within barrier_timeout="
            f"{self.host.limits.barrier} s: ranks {ranks} did not come"
        )

    async def _wait_end_of_others(self, k: int) -> bytes:
        """Of a newcomer: waits until iteration k has ended, and everyone has left it."""
        pause = self.host.limits.backstop
        while True:
            try:
                how = await self.link.wait_for(f"over/{k}", pause)
                if how == RESTART:
                    await self.link.wait_for(barrier.done_key(f"term/{k}"), pause)
                return how
            except KeyTimeout:
                pause = min(2 * pause, 60.0)
                newest = await self.membership.current()
                if newest > k:  # it has been ended, decided and perhaps forgotten meanwhile
                    self.iteration = newest - 1
                    return RESTART
                view = await self.membership.view(k)
                if view is not None:
                    await barrier.check(self.link, f"start/{k}", view.expected)
                    if not await barrier.check(self.link, f"term/{k}", view.expected):
                        await self.membership.end(k, RESTART)  # nobody is left who would

    async def _await_replacements(self) -> None:
        """Holds the restart until the job has its size again, or the time is over."""
        limits, now = self.host.limits, self.host.clock.now
        deadline = now() + limits.await_seconds
        roster, _ = await self.membership.roster(self.iteration)
        while True:
            seen = int(await self.link.read("joined") or b"0")
            gone = await barrier.lost_members(self.link)
            joins = await self.membership.joiners()
            present = (set(roster.values()) | {j.member for j in joins}) - gone
            decided = await self.membership.view(self.iteration + 1) is not None
            if decided or len(present) >= limits.await_size or now() >= deadline:
                return
            try:
                await self.link.wait_for(f"joined/{seen + 1}", deadline - now())
            except KeyTimeout:
                return

    async def _faults(self, k: int) -> list[FaultRecord]:
        """The faults that iteration k ended with: the same ones on every member. An end may be
        told while some members have read them already. So the first one of a member counts, and
        that of nobody who came to the barrier `term/k`, or had no part in k.
        """
        faults = await self.membership.faults(k)
        if any(ends(fault) for fault in faults):
            came = await barrier.arrivals(self.link, f"term/{k}")
            view = await self.membership.view(k)
            missing = set() if view is None else set(view.expected - came.keys())
            kept = []
            for fault in faults:
                if not ends(fault) or fault.member in missing:
                    kept.append(fault)
                    missing -= {fault.member} if ends(fault) else set()
            faults = kept
        return faults

    def _same_view(self, arrived: dict[int, dict[str, Any]]) -> bool:
        """R1, checked where it counts: ranks dense from 0, sizes equal. A gap is a member that
        was lost on the way here. Two members at one place can only be a wrong assignment.
        """
        ranks = sorted(said["rank"] for said in arrived.values())
        sizes = {said["world_size"] for said in arrived.values()}
        if len(set(ranks)) != len(ranks) or len(sizes) > 1:
            raise InternalError(
                f"the rank assignment gave ranks {ranks} and world sizes {sorted(sizes)}: "
                "it must give every rank once, and one world size, on all members"
            )
        return ranks == list(range(self.place.world_size))
