"""The rank-local side of the recovery: the work of this process, and the thread of each part.

`RankHost` is driven by `recovery/state_machine.py`, in the function's thread. It enters and leaves
the function, classifies how the function ended, and runs finalize and the health check. The abort
runs in the monitor thread (`interruption/monitor_thread.py`), which then interrupts the function.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import outlast.events.types as ev
from outlast.clock import Clock, MonotonicClock
from outlast.coordination.decision import Decision, ViewRecord
from outlast.coordination.ops import Link
from outlast.coordination.records import process_token
from outlast.coordination.training_step import count_restart, go_into_reserve, loop
from outlast.errors import HealthCheckError, InternalError, RankShouldRestart, RestartAbort
from outlast.events.emitter import Emitter
from outlast.events.fault_record import FaultRecord
from outlast.inprocess.abort import run_all
from outlast.inprocess.call_wrapper import CallWrapper, observers
from outlast.inprocess.ending import Completion, Terminate
from outlast.inprocess.environment import Launch, publish_rank
from outlast.inprocess.health_check import check_device_context
from outlast.inprocess.interruption.communicators import await_aborts
from outlast.inprocess.interruption.error_kinds import is_consequence
from outlast.inprocess.interruption.foreign_handlers import ForeignHandlers
from outlast.inprocess.interruption.interrupter import AtomicSection
from outlast.inprocess.interruption.monitor_thread import (
    IterationWatch,
    MonitorThread,
    sample_of_error,
)
from outlast.inprocess.interruption.program_stores import ProgramStores
from outlast.inprocess.interruption.release import ModesAtStart, Releaser
from outlast.inprocess.monitor.shared_page import Activity
from outlast.inprocess.rank_assignment import ShiftRanks
from outlast.inprocess.recovery.host_protocol import (
    Interrupted,
    Raised,
    RecoveryState,
    Returned,
)
from outlast.inprocess.recovery.monitor_supervisor import MonitorSupervisor
from outlast.inprocess.recovery.next_ranks import exchange_values, state_in_view
from outlast.inprocess.recovery.rank_faults import RankFaults
from outlast.inprocess.recovery.settings import Settings
from outlast.inprocess.running_call import RunningCall
from outlast.inprocess.state import LazyStore, State, Status
from outlast.inprocess.store import IterationStore
from outlast.inprocess.timeouts import Adaptive, GapEstimator
from outlast.system import symmetric_memory
from outlast.system.error_text import first_line, release_frames
from outlast.system.fork import end_stray_child

log = logging.getLogger("outlast.inprocess")


class RankHost(RankFaults):
    """The `Host` of a real rank."""

    # Set by the session.
    monitor_thread: MonitorThread
    monitor: MonitorSupervisor
    policy_store: LazyStore
    stores: ProgramStores

    def __init__(
        self,
        settings: Settings,
        function: Callable[[CallWrapper], Any],
        launch: Launch,
        running: RunningCall,
        atomic_section: AtomicSection,
        emitter: Emitter,
        number: int,
        prefix: str,
        address: str,
    ) -> None:
        super().__init__(running, emitter, settings.durations(launch))
        self.settings, self.function, self.prefix = settings, function, prefix
        self._position = launch.attempt, number
        self.atomic_section = atomic_section
        self.iteration_store = IterationStore(address)
        self.clock: Clock = MonotonicClock()
        self.token, self.pid = process_token(launch.host_id, secrets.token_hex(8)), os.getpid()
        self.preferred_rank = launch.rank
        # Those of a host that leaves are succeeded together; one of this host, alone.
        alone = launch.succeeds is not None and launch.succeeds[0] == launch.host_id
        count = 1 if alone else launch.local_world_size
        first = launch.rank - launch.rank % count
        self.succeeds = launch.succeeds and (range(first, first + count), *launch.succeeds)
        self.grow, self.rules = settings.grow_policy, settings.rules(launch)
        self.cause: FaultRecord | None = None
        self.releaser, self.modes = Releaser(), ModesAtStart()
        self.foreign_handlers = ForeignHandlers()
        self.watch: IterationWatch | None = None  # of the current iteration
        self.joining = False  # this process has asked to join, and is not admitted yet
        self.saves = False  # in this iteration, the ranks only save what they keep
        self.refusal: RestartAbort | None = None  # why this iteration is not to be

    def at(self, state: RecoveryState) -> None:
        self.page.publish(self.place, self.clock.now())
        self.foreign_handlers.hold()
        self.note_kept(self.foreign_handlers.kept)
        place = self.place
        log.debug("rank %d: iteration %d: %s", place.rank, place.iteration, state.value)
        if state is RecoveryState.JOIN and not self.joining:
            self.joining = True
            self.emitter.emit(ev.Joined(preferred_rank=self.preferred_rank))

    def timing(self, name: str) -> AbstractContextManager[object]:
        log.debug("rank %d: waiting at the barrier %s", self.place.rank, name)
        return self.emitter.span(ev.BarrierPassed, name=name)

    def progress(self) -> dict[str, int]:
        knows = self.running.least_is_known or self.settings.await_replacements is not None
        least = self.running.least if knows else -1
        active = self.running.state.active_world_size
        return {"step": self.page.step, "pings": self.pings, "least": least, "active": active}

    @property
    def keeps(self) -> bool:
        return self.running.rescue is not None

    # -- from the function through a fault to the function again, in this order -------------------

    async def call(self) -> Returned | Raised | Interrupted:
        watch, page, iteration = self._present_watch(), self.page, self.place.iteration
        self.running.state.status = Status.ACTIVE
        self.emitter.emit(ev.Entered())
        log.debug("rank %d: iteration %d: calling the function", self.place.rank, iteration)
        page.enter(Activity.FUNCTION, self.clock.now())
        value, handled = None, sys.exc_info()[1]
        error: BaseException | None = RankShouldRestart(
            "the iteration was over before the function was called"
        )
        if not watch.ending.is_set():
            # Every `init_process_group` wraps the hook for uncaught exceptions again.
            hook = sys.excepthook
            value, error = self.atomic_section.interrupter.run(self._function)
            if getattr(sys.excepthook, "__module__", "") == "torch.distributed.distributed_c10d":
                sys.excepthook = hook
            if os.getpid() != self.pid:
                end_stray_child(error)
            self.atomic_section.function_left()
            if error is not None:
                now = self.clock.now()
                watch.sample = sample_of_error(error, page, now, watch, self.least_hang)
                self.modes.restore()
                count_restart()
        self.pings, self.ran = page.pings, self.clock.now() - page.pinged
        # A function that has pinged, and made no `Job`, makes none: it runs with any number.
        self.running.least_is_known |= self.pings > 0
        # In this order: once `left` is set, the monitor thread no longer writes `activity`.
        watch.left.set()
        if not watch.ending.is_set():
            page.enter(Activity.WAITING, self.clock.now())
        if self.running.moved is not None:  # whatever has interrupted it on its way out
            raise self.running.moved
        outcome = self.classify(value, error, handled, watch.ending.is_set())
        error = handled = None  # their tracebacks refer to this frame
        how = type(outcome).__name__.lower()
        log.debug("rank %d: iteration %d: the function %s", self.place.rank, iteration, how)
        self.emitter.emit(ev.LeftFunction(outcome=how, pings=page.pings))
        return outcome

    def _function(self) -> Any:
        soft = self.settings.timeouts.soft_timeout
        call = CallWrapper(
            self.running.state,
            self.page,
            self.atomic_section,
            self.clock,
            GapEstimator(soft) if isinstance(soft, Adaptive) else None,
            self.monitor.pid,
            self.monitor.wake,
        )
        self.running.wrapper = call
        if self.saves:
            return None if self.running.rescue is None else self.running.rescue()
        for observer in observers():
            observer.entered(call)
        with self.foreign_handlers.released():
            return self.function(call)

    def run_abort(self, again: bool) -> None:
        self.running.read_lease.recall()  # `again`, too: an error may have kept this from a first
        if again:
            for part in self.settings.abort_parts:
                part.again(self.running.state.copy())
            self.stores.end_wait()
            return
        self.torch_log.begin()
        self.releaser.hold()
        run_all(self.settings.abort_parts, self.running.state.copy())

    async def settle(self) -> None:
        watch, self.watch = self.watch, None
        count_restart()
        self.running.state.status = Status.ABORTING
        if watch is None:
            # The iteration ended while this rank was still at the barrier before it. The abort runs
            # all the same: on every rank once for each restart, whichever rank was faster.
            watch = self.monitor_thread.watch_iteration(self._over, left=True)
        watch.left.set()
        with self._user_code():  # the abort, in the monitor thread: the hard timeout applies
            watch.wait(None)
        self.sample = watch.sample
        self.running.state.status = Status.ABORTED
        error, self.error = self.error, None
        train_ex = None if error is None or is_consequence(error) else error
        if error is not None:
            release_frames(error)
        with self._user_code(Activity.LEAVING):
            await_aborts()
        log.debug("rank %d: iteration %d: finalize", self.place.rank, self.place.iteration)
        check_device_context(self.place.rank)
        with self._user_code(Activity.LEAVING), self.emitter.span(ev.FinalizeDone):
            self._notify_recovering()
            self.releaser.release()
            self.stores.watch()
            if self.settings.finalize is not None:
                result: Any = self.settings.finalize(self.running.state, train_ex)
                self.running.state = self._kept(result)
                if isinstance(result, tuple) and len(result) == 2:
                    train_ex = result[1]
        try:
            self._check_health(train_ex)
        except HealthCheckError:
            raise
        except Exception as e:
            raise HealthCheckError(
                f"rank {self.place.rank} on {self.emitter.host}: {first_line(e, with_type=True)}"
            ) from e
        self.monitor.replace_if_lost()

    def _check_health(self, train_ex: BaseException | None) -> None:
        check = self.settings.health_check
        if check is None:
            return
        log.debug("rank %d: health check after %r", self.place.rank, train_ex)
        activity = (
            Activity.LEAVING if self.running.state.status is Status.ABORTED else Activity.USER
        )
        with self._user_code(activity), self.emitter.span(ev.HealthCheckDone):
            self.running.state = self._kept(check(self.running.state, train_ex))

    def decided(self, decision: Decision, *, reports: bool) -> None:
        # Only now, when every rank has left: a torch client that finds no server retries forever,
        # in C++, where no interrupt reaches it.
        self.iteration_store.close()
        self.page.store_port = 0
        self.torch_log.end()  # every operation that the abort ended has returned
        self.cause = decision.cause
        came_back = self.rules.repeated is not None and decision.history.came_back
        self.running.fault_came_back = came_back
        self.note_decision(decision)
        self.show(decision, reports)
        if symmetric_memory.is_used() and not decision.ends_job:
            self.notice.leaves(symmetric_memory.ONCE)
            where = f"rank {self.place.rank} on {self.emitter.host}"
            raise HealthCheckError(f"{where}: {symmetric_memory.ONCE}; this one is to be replaced")

    async def assign(self, link: Link, record: ViewRecord) -> None:
        member = self.place.member
        assignment, rank_filter = self.settings.rank_assignment, self.settings.rank_filter
        parts = self.settings.assignments
        self.saves, self.refusal, self.ran = record.saves, None, 0.0
        if record.saves:
            assignment, rank_filter = ShiftRanks(), None
            parts = [assignment]
        await exchange_values(link, self, record, member, self.running.state, parts)
        start = self.clock.now()
        # The iteration has no store of its own before its ranks are known.
        before = self.running.state.copy(
            iteration=record.iteration, status=Status.INITIALIZED, store=self.policy_store
        )
        try:
            state = state_in_view(record, member, before, assignment, rank_filter)
            self.running.assigned(record, member, state, self.cause)
        except RestartAbort as e:
            if not self.keeps:
                raise
            # `initialize` raises it: the others are waiting at the barrier before that.
            self.refusal, state = e, state_in_view(record, member, before, ShiftRanks())
        if self.joining:
            state.initial_rank, self.joining = state.rank, False
            self.emitter.emit(ev.Admitted(rank=state.rank))
        state.store = LazyStore(self.iteration_store.connect)
        self.running.state = state
        self.place.rank, self.place.world_size = state.rank, state.world_size
        self.place.active = state.active
        if not self.place.active:
            go_into_reserve()
        self.emitter.emit(
            ev.Assigned(
                world_size=state.world_size,
                active_world_size=state.active_world_size,
                active=self.place.active,
                seconds=self.clock.now() - start,
            )
        )
        log.debug(
            "iteration %d: assigned rank %d of %d, %d active (initial rank %d)",
            record.iteration,
            state.rank,
            state.world_size,
            state.active_world_size,
            state.initial_rank,
        )

    def serve(self) -> str | None:
        if self.place.rank != 0:
            return None
        where = self.iteration_store.serve()
        self.page.store_port = self.iteration_store.endpoint[1]
        return where

    async def initialize(self, store: str) -> FaultRecord | None:
        if self.refusal is not None:
            raise self.refusal
        self.iteration_store.where = store
        self.monitor.replace_if_lost()
        self.atomic_section.reset()
        self.page.begin_iteration()
        self.pings = 0
        loop.begin()
        self.watch = self.monitor_thread.watch_iteration(self._over)
        self.stores.replace()
        publish_rank(
            self.place.rank,
            self.running.state.active_world_size,
            (*self._position, self.place.iteration),
            self.iteration_store.endpoint,
        )
        if self.saves:
            return None
        where = "initialize: "
        try:
            if self.place.iteration > 0:
                with self._user_code():
                    self._notify_recovering()
            if self.settings.initialize is not None:
                with self._user_code(), self.emitter.span(ev.InitializeDone):
                    self.running.state = self._kept(self.settings.initialize(self.running.state))
            # A failure here does not exclude the rank: the check after the restart decides that.
            where = "health_check: "
            self._check_health(None)
        except Exception as e:  # noqa: BLE001 - any exception is a fault of this rank
            self.error = e
            return self.own_fault(e, where)
        return None

    # -- the end of an iteration without a fault, and of the call ----------------------------------

    async def wait_over(self, link: Link, timeout: float | None) -> bytes:
        if not self.place.active:
            self.emitter.emit(ev.Entered(active=False))
        watch = self._present_watch()
        watch.left.set()
        return watch.wait(timeout)

    def run_at_end(self, hook: Completion | Terminate | None) -> None:
        """Runs a hook at the end of the call, whose failure does not change the outcome."""
        if hook is None:
            return
        try:
            with self._user_code():
                hook(self.running.state.copy())
        except Exception:
            log.exception("rank %d: %s raised an exception", self.place.rank, type(hook).__name__)

    def release(self) -> None:
        """Ends the call: breaks the cycle with the session, which would keep all resources."""
        self.watch = None
        del self.monitor_thread, self.monitor

    # -- parts of these ----------------------------------------------------------------------------

    def _notify_recovering(self) -> None:
        for observer in observers():
            observer.recovering(self.place.iteration, self.place.rank)

    @property
    def _over(self) -> str:
        return f"{self.prefix}over/{self.place.iteration}"

    def _present_watch(self) -> IterationWatch:
        if self.watch is None:
            raise InternalError("the function is entered without a watch over the iteration")
        return self.watch

    def _kept(self, result: Any) -> State:
        """The state that a policy returned, alone or with `train_ex`; all else is no change."""
        state = result[0] if isinstance(result, tuple) and len(result) == 2 else result
        return state if isinstance(state, State) else self.running.state

    @contextmanager
    def _user_code(self, activity: Activity = Activity.USER) -> Iterator[None]:
        """Marks user code around the function: the hard timeout applies to it. `LEAVING` after a
        fault: an endless loop would let all others, which wait at a barrier, time out.
        """
        self.page.enter_user_code(activity, self.clock.now())
        try:
            yield
        finally:
            self.page.enter(Activity.WAITING, self.clock.now())
