"""The rank-local side of the state machine: what happens in this process, in which thread.

`RankHost` is driven by `recovery/machine.py` in the function's thread. It enters and leaves the
function, judges how it ended, and runs abort, finalize and health check at their places.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from outlast.clock import Clock, MonotonicClock
from outlast.coordination.ops import Link
from outlast.coordination.records import FaultRecord
from outlast.coordination.view import ViewRecord
from outlast.errors import HealthCheckError, InternalError, RankShouldRestart
from outlast.events import (
    Admitted,
    Assigned,
    BarrierPassed,
    Emitter,
    Entered,
    Fault,
    FinalizeDone,
    HealthCheckDone,
    InitializeDone,
    Joined,
    LeftFunction,
)
from outlast.events.hang_report import HUNG
from outlast.inprocess.distributed.release import Releaser
from outlast.inprocess.environment import Launch, publish_place
from outlast.inprocess.interruption.atomic import AtomicGate
from outlast.inprocess.interruption.fault_echo import is_consequence, is_interrupt, let_go
from outlast.inprocess.interruption.interrupter import Interrupter
from outlast.inprocess.interruption.monitor_thread import Guard, Watcher
from outlast.inprocess.interruption.stack_sample import Standstill
from outlast.inprocess.progress.shared_page import Activity, SharedPage
from outlast.inprocess.recovery.contract import Interrupted, Limits, Phase, Place, Raised, Returned
from outlast.inprocess.recovery.iteration_store import IterationStore
from outlast.inprocess.recovery.next_view import place_of
from outlast.inprocess.recovery.settings import Settings
from outlast.inprocess.state import LazyStore, State, Status
from outlast.system.error_text import first_line, traceback_text
from outlast.system.fork import end_stray_child

__all__ = ["RankHost"]

log = logging.getLogger("outlast.inprocess")

_TRACEBACK_CHARS = 8_000  # it goes through the store, to every rank


class RankHost:
    """See the module. The session sets `watcher`, `call_function` and `repair`."""

    watcher: Watcher
    call_function: Callable[[State], Any]
    repair: Callable[[], None]

    def __init__(
        self,
        settings: Settings,
        launch: Launch,
        page: SharedPage,
        gate: AtomicGate,
        interrupter: Interrupter,
        emitter: Emitter,
        prefix: str,
        address: str,
    ) -> None:
        self.settings, self.launch, self.page = settings, launch, page
        self.gate, self.interrupter, self.emitter = gate, interrupter, emitter
        self.prefix = prefix
        self.iteration_store = IterationStore(address)
        self.clock: Clock = MonotonicClock()
        self.token = secrets.token_hex(8)
        self.pid = os.getpid()
        self.preferred_rank = launch.rank
        self.grow = settings.grow_policy
        held = settings.await_replacements
        self.limits = Limits(
            barrier=settings.barrier_timeout.total_seconds(),
            completion=settings.completion_timeout.total_seconds(),
            backstop=max(1.0, settings.monitor_thread_interval.total_seconds()),
            await_size=0 if held is None else launch.world_size,
            await_seconds=held or 0.0,
        )
        self.state = State(
            rank=launch.rank,
            world_size=launch.world_size,
            initial_rank=launch.rank,
            initial_world_size=launch.world_size,
        )
        self.releaser = Releaser()
        self.guard: Guard | None = None
        self.error: BaseException | None = None
        self.joining = False
        self.found: Standstill | None = None

    # -- places ------------------------------------------------------------------------------

    def at(self, phase: Phase, iteration: int, member: int) -> None:
        self.page.iteration, self.page.member = iteration, member
        self.page.activity = Activity.WAITING
        self.emitter.place(iteration=iteration, member=member)
        if phase is Phase.JOIN and not self.joining:
            self.joining = True
            self.emitter.emit(Joined(preferred_rank=self.preferred_rank))

    def assign(self, record: ViewRecord, member: int) -> Place:
        self.emitter.place(iteration=record.iteration)
        start = self.clock.now()
        before = self.state.copy(
            iteration=record.iteration,
            status=Status.INITIALIZED,
            store=LazyStore(self.iteration_store.connect),
        )
        state = place_of(
            record, member, before, self.settings.rank_assignment, self.settings.rank_filter
        )
        if self.joining:
            state.initial_rank, self.joining = state.rank, False
            self.emitter.emit(Admitted(rank=state.rank))
        self.state = state
        self.page.rank = state.rank
        self.emitter.place(rank=state.rank)
        self.emitter.emit(
            Assigned(
                world_size=state.world_size,
                active_world_size=state.active_world_size,
                active=state.active,
                seconds=self.clock.now() - start,
            )
        )
        return Place(state.rank, state.world_size, state.active)

    # -- in the iteration --------------------------------------------------------------------

    async def publish(self, link: Link, iteration: int) -> None:
        if self.state.rank == 0:
            where = self.iteration_store.serve()
            self.page.store_port = self.iteration_store.endpoint[1]
            await link.put(f"store/{iteration}", where.encode())

    async def initialize(self, link: Link, iteration: int) -> FaultRecord | None:
        where = await link.read(f"store/{iteration}")
        if where is None:
            raise InternalError(f"rank 0 named no store for iteration {iteration}")
        self.iteration_store.where = where.decode()
        self.repair()
        self.gate.reset()
        self.page.pings = 0
        self.page.soft_limit = self.page.long_limit = 0.0
        self.guard = self.watcher.guard(f"{self.prefix}over/{iteration}")
        publish_place(
            self.state.rank, self.state.active_world_size, iteration, self.iteration_store.endpoint
        )
        initialize = self.settings.initialize
        if initialize is not None:
            try:
                with self._user_code(), self.emitter.span(InitializeDone):
                    self.state = initialize(self.state)
            except Exception as e:  # noqa: BLE001 - a fault of this rank, whatever it is
                self.error = e
                return self._own_fault(e, "initialize: ")
        self._check_health(None)
        return None

    async def call(self, iteration: int) -> Returned | Raised | Interrupted:
        guard, page = self._guard(), self.page
        self.state.status = Status.ACTIVE
        self.emitter.emit(Entered())
        page.progress = self.clock.now()
        page.activity = Activity.FUNCTION
        value: Any = None
        error: BaseException | None = RankShouldRestart("over before it began")
        if not guard.seen.is_set():
            # Every `init_process_group` wraps the hook that prints uncaught exceptions once more.
            hook = sys.excepthook
            value, error = self.interrupter.run(lambda: self.call_function(self.state))
            if getattr(sys.excepthook, "__module__", "") == "torch.distributed.distributed_c10d":
                sys.excepthook = hook
            if os.getpid() != self.pid:
                end_stray_child(error)
            self.gate.left()
        # In this order: once `left` is set, the watcher does not touch `activity` any more.
        guard.left.set()
        if not guard.seen.is_set():
            page.activity = Activity.WAITING
        outcome = self._judge(value, error, guard.seen.is_set())
        kind = (
            "interrupted"
            if isinstance(outcome, Interrupted)
            else ("raised" if isinstance(outcome, Raised) else "returned")
        )
        self.emitter.emit(LeftFunction(outcome=kind))
        return outcome

    async def wait_over(self, link: Link, iteration: int, timeout: float | None) -> bytes:
        if not self.state.active:
            self.emitter.emit(Entered(active=False))
        guard = self._guard()
        guard.left.set()
        return guard.wait(timeout)

    async def settle(self, iteration: int) -> None:
        guard, self.guard = self.guard, None
        self.state.status = Status.ABORTING
        if guard is not None:
            guard.left.set()
            with self._user_code():  # the abort, in the other thread: the hard timeout applies
                guard.wait(None)
        self.found = None if guard is None else guard.found
        self.state.status = Status.ABORTED
        error, self.error = self.error, None
        train_ex = None if error is None or is_consequence(error) else error
        if error is not None:
            let_go(error)
        with self._user_code(), self.emitter.span(FinalizeDone):
            self.releaser.release()
            if self.settings.finalize is not None:
                self.state, train_ex = self.settings.finalize(self.state, train_ex)
        self._check_health(train_ex)
        self.repair()

    # -- faults ------------------------------------------------------------------------------

    def fault(self, iteration: int, interruption: str, cause: str) -> FaultRecord:
        return self._record(iteration, interruption, cause, "", False)

    def fault_of(self, iteration: int, error: BaseException) -> FaultRecord:
        record = self._record(
            iteration,
            "BASE_EXCEPTION",
            first_line(error, with_type=True),
            traceback_text(error, _TRACEBACK_CHARS),
            is_consequence(error),
        )
        self._emit(record)
        return record

    def testimony(self, iteration: int, faults: list[FaultRecord]) -> FaultRecord | None:
        found = self.found
        reported = [f.idle for f in faults if f.interruption == HUNG and not f.testimony]
        if found is None or not reported:
            return None
        what = "until the soft timeout"
        if self.page.reported_soft != iteration:
            # Its own timeout had not come yet. Those that are timed out wait for one that stands
            # still about as long: half as long at least, or it is one that gets on.
            if found.declared or found.idle < min(reported) / 2:
                return None
            what = f"for {found.idle:.3f} s, when another rank's soft timeout ended the iteration"
        cause = f"no progress {what}; it was at {found.where or 'an unknown place'}"
        record = dataclasses.replace(
            self._record(iteration, HUNG, cause, "", found.waits),
            pings=found.pings,
            collectives=found.collectives,
            idle=found.idle,
            testimony=True,
        )
        self._emit(record)
        return record

    def restarting(self, cause: FaultRecord | None, faults: list[FaultRecord]) -> None:
        # Not before everyone has left: torch's client that finds no server tries again and again,
        # in C++, where no interrupt gets it out.
        self.iteration_store.close()
        self.page.store_port = 0
        if cause is None:
            log.info("restart of iteration %d: the job changes its size", self.state.iteration)
        else:
            log.warning(
                "restart of iteration %d: rank %d on %s: %s",
                cause.iteration,
                cause.rank,
                cause.host,
                cause.cause,
            )

    def let_go(self) -> None:
        """The end of the call: session and host hold each other, and so all that is theirs, until
        a garbage collection comes.
        """
        self.repair = _nothing
        self.call_function = _nothing
        self.guard = None
        del self.watcher

    @contextmanager
    def timing(self, name: str) -> Iterator[object]:
        with self.emitter.span(BarrierPassed, name=name) as span:
            yield span

    # -- parts -------------------------------------------------------------------------------

    def _guard(self) -> Guard:
        if self.guard is None:
            raise InternalError("the function is entered without a guard")
        return self.guard

    def _judge(
        self, value: Any, error: BaseException | None, seen: bool
    ) -> Returned | Raised | Interrupted:
        if error is None:
            return Returned(value)
        if seen and (is_interrupt(error) or is_consequence(error)):
            let_go(error)
            return Interrupted()
        if isinstance(error, Exception | RankShouldRestart):
            self.error = error
            return Raised(self._own_fault(error))
        raise error

    def _own_fault(self, error: BaseException, where: str = "") -> FaultRecord:
        record = self._record(
            self.state.iteration,
            "EXCEPTION",
            where + first_line(error, with_type=True),
            traceback_text(error, _TRACEBACK_CHARS),
            is_consequence(error),
        )
        self._emit(record)
        return record

    def _record(
        self, iteration: int, interruption: str, cause: str, text: str, consequence: bool
    ) -> FaultRecord:
        return FaultRecord(
            iteration=iteration,
            member=self.page.member,
            rank=self.state.rank,
            host=self.emitter.host,
            pid=os.getpid(),
            interruption=interruption,
            cause=cause,
            traceback=text,
            consequence=consequence,
            pings=self.page.pings,
        )

    def _emit(self, record: FaultRecord) -> None:
        self.emitter.emit(
            Fault(
                iteration=record.iteration,
                interruption=record.interruption,
                cause=record.cause,
                traceback=record.traceback,
                consequence=record.consequence,
                testimony=record.testimony,
                pings=record.pings,
                collectives=record.collectives,
            )
        )

    def _check_health(self, train_ex: BaseException | None) -> None:
        check = self.settings.health_check
        if check is None:
            return
        try:
            with self._user_code(), self.emitter.span(HealthCheckDone):
                self.state, _ = check(self.state, train_ex)
        except HealthCheckError:
            raise
        except Exception as e:
            raise HealthCheckError(
                f"rank {self.state.rank} on {self.emitter.host}: {first_line(e, with_type=True)}"
            ) from e

    @contextmanager
    def _user_code(self) -> Iterator[None]:
        """User code around the function: the hard timeout applies to it."""
        self.page.progress = self.clock.now()
        self.page.pings = 0
        self.page.activity = Activity.USER
        try:
            yield
        finally:
            self.page.activity = Activity.WAITING


def _nothing(*args: Any) -> None:
    """In the place of what belongs to a call that is over."""
