"""One call of a wrapped function: sets up everything that it needs, and tears it down at the end.

The setup order is: monitor process (which may serve the store), connections, signal handler,
monitor thread, heartbeat thread. The teardown is in reverse order. The monitor process is dismissed
last, because until then it reports the end of this process as a fault.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from outlast.clock import MonotonicClock
from outlast.coordination.ops import Link, perform_on, run
from outlast.coordination.records import process_name
from outlast.coordination.stores.store import KeyTimeout
from outlast.coordination.training_step import observed_steps
from outlast.coordination.waits import observed_by
from outlast.errors import RankMoved, StoreError
from outlast.events.emitter import Emitter, JsonlSink, NullSink, Place, Sink
from outlast.events.fault_record import FaultRecord
from outlast.events.restart_causes import describe_restarts
from outlast.events.types import Completed, Lost
from outlast.inprocess.call_wrapper import CallWrapper
from outlast.inprocess.environment import exported, is_host_server, launched_job, read_launch
from outlast.inprocess.interruption.interrupter import AtomicSection, Interrupter
from outlast.inprocess.interruption.monitor_thread import MonitorThread
from outlast.inprocess.interruption.program_stores import ProgramStores
from outlast.inprocess.monitor.reports import MonitorPlan
from outlast.inprocess.monitor.shared_page import SharedPage
from outlast.inprocess.recovery.launcher_notice import LauncherNotice
from outlast.inprocess.recovery.monitor_supervisor import MonitorSupervisor
from outlast.inprocess.recovery.rank_host import RankHost
from outlast.inprocess.recovery.settings import Settings
from outlast.inprocess.recovery.state_machine import Machine
from outlast.inprocess.running_call import RunningCall
from outlast.inprocess.state import LazyStore, State
from outlast.inprocess.store import Connection, PrefixStore, TCPStore, connect, open_store
from outlast.system import symmetric_memory
from outlast.system.departure import Departure, tell_end_of_script
from outlast.system.error_text import describe
from outlast.system.main_program import exit_fast, freeze_imports
from outlast.system.notices import apart_from_bars, notice
from outlast.system.sockets import address_towards

log = logging.getLogger("outlast.inprocess")

_calls = itertools.count()
_running = threading.Lock()


def run_call(
    settings: Settings,
    function: Callable[[CallWrapper], Any],
    name: str,
    sink: Sink | None,
    stores: ProgramStores,
) -> Any:
    """Runs `function` under the wrapper until every rank has completed it. A `ValueError` if
    `torch.distributed` is already initialized, or a wrapped call is running.

    `name` is the name of the user's function, for errors. Without a sink, events go to a file in
    `OUTLAST_EVENTS_DIR`, if that is set.
    """
    if dist.is_available() and dist.is_initialized():
        raise ValueError(
            f"{name}: torch.distributed is initialized already; the wrapped function makes its "
            "own process group, in every iteration"
        )
    if not _running.acquire(blocking=False):
        raise ValueError(f"{name}: another wrapped call is running; wrapped calls do not nest")
    freeze_imports()
    exit_fast()
    session = None
    try:
        session = _Session(settings, function, sink)
        session.host.stores = stores
        value = session.run()
        if session.host.joining and (job := launched_job()):
            Departure(0, session.prefix, []).tell(job)  # what it does now is not cut short
        return value
    except BaseException as error:
        if session is not None and (job := launched_job()):
            Departure.by(error, session.prefix).tell(job)
        raise
    finally:
        tell_end_of_script(launched_job())
        _running.release()


class _Session:
    def __init__(
        self, settings: Settings, function: Callable[[CallWrapper], Any], sink: Sink | None
    ) -> None:
        self.settings = settings
        self.launch = launch = read_launch()
        self.number = next(_calls)
        self.prefix = f"outlast/{launch.attempt}/{self.number}/"
        self.store_kwargs = self._store_kwargs()
        self.endpoint = settings.store_factory.endpoint(**self.store_kwargs)
        address = launch.host_address or address_towards(self.endpoint)
        sink = self._default_sink() if sink is None else sink
        self.place = Place(rank=launch.rank, world_size=launch.world_size)
        self.emitter = Emitter(sink, place=self.place, clock=MonotonicClock())
        self.ready = f"{self.prefix}served" if self._job_serves_store() else ""
        self.page = SharedPage()
        self.interrupter = Interrupter()
        self.running = RunningCall(
            self.page,
            launch,
            State(launch.rank, launch.world_size, launch.rank, launch.world_size),
            awaits=settings.await_replacements is not None,
            has_filter=settings.rank_filter is not None,
        )
        self.host = RankHost(
            settings,
            function,
            launch,
            self.running,
            AtomicSection(self.interrupter),
            self.emitter,
            self.number,
            self.prefix,
            address,
        )
        self.machine = Machine(self.host, Link(self.prefix), launch.world_size)
        self.running.membership = self.machine.membership
        self.completed = False
        self.progressed_in = -1  # the iteration for which the launcher knows of progress

    def run(self) -> Any:
        host, launch, machine = self.host, self.launch, self.machine
        with ExitStack() as stack:
            stack.callback(self.emitter.sink.close)
            stack.callback(self.page.close)
            stack.callback(self.running.read_lease.close)
            stack.callback(host.note_kept, host.foreign_handlers.kept)
            stack.callback(host.foreign_handlers.release)
            stack.enter_context(observed_steps(self._reached))
            stack.enter_context(observed_by(self.page))
            stack.enter_context(exported())
            stack.enter_context(apart_from_bars())
            # These look at all modules: after the fork of the monitor process, each page that a
            # count of references is on would be copied.
            stack.enter_context(host.releaser.keeping_destroyed())
            stack.enter_context(symmetric_memory.noted())
            serves = bool(self.ready) and launch.rank == 0 and not launch.replacement
            host.monitor = MonitorSupervisor(
                self._monitor_plan,
                serves,
                host.durations,
                self.page,
                self.interrupter,
                self.emitter,
            )
            monitor = host.monitor
            stack.callback(lambda: monitor.dismiss(completed=self.completed))
            stack.callback(host.iteration_store.close)
            # After the monitor thread, which runs the abort, has ended.
            stack.callback(lambda: host.releaser.end())
            stack.callback(host.stores.close)
            host.stores.watch()  # until the first iteration: a rank may be lost before that
            self.endpoint = monitor.endpoint
            factory, kwargs = self.settings.store_factory, self.store_kwargs
            patience = host.durations.barrier
            store = connect(factory, kwargs, self.endpoint, patience, self.ready)
            stack.callback(store.close)
            self.interrupter.install()
            stack.callback(self.interrupter.restore)
            host.monitor_thread = MonitorThread(
                store,
                host.atomic_section,
                self.interrupter,
                self.page,
                host.run_abort,
                self.emitter,
                host.least_hang,
            )
            stack.callback(host.torch_log.end)
            stack.callback(host.release)
            stack.callback(lambda: host.monitor_thread.close(5.0))
            machine.link.perform = perform_on(store)
            self.running.read_lease.begin(machine.membership)
            process = process_name(launch.host_id, os.getpid()) if launch.agent else ""
            host.notice = LauncherNotice(store, self.number, self.prefix, process=process)
            host.notice.running()

            def report(fault: FaultRecord) -> None:
                # The monitor thread also notices a lost store, and tells the function's thread.
                with contextlib.suppress(StoreError):
                    run(machine.membership.report_fault(fault))

            monitor.watch(
                host.monitor_thread.native_id,
                lambda cause: report(host.fault(cause)),
                lambda error: report(host.leaving_fault(error)),
            )
            stack.callback(monitor.stop_heartbeat)
            log.debug(
                "rank %d of %d: call %d begins in process %d, with monitor process %d",
                launch.rank,
                launch.world_size,
                self.number,
                os.getpid(),
                monitor.pid,
            )
            host.policy_store = LazyStore(self._open_policy_store)
            for assignment in self.settings.assignments:
                assignment.prepare()
            for part in self.settings.abort_parts:
                part.prepare()
            with self.running:
                return self._drive(store)

    def _drive(self, store: Connection) -> Any:
        machine, host = self.machine, self.host
        try:
            value = run(machine.run())
        except BaseException as e:
            log.debug("rank %d: leaving the call: %r", self.place.rank, e)
            why = e.reason if isinstance(e, RankMoved) else describe(e)
            self.emitter.emit(Lost(reason=why, moved=isinstance(e, RankMoved)))
            # The monitor thread still waits for the others, or interrupts until this is set: also
            # if the store is lost.
            if host.watch is not None:
                host.watch.left.set()
            if not isinstance(e, StoreError | GeneratorExit):
                self._tell_restarts("ended")
            if not isinstance(e, GeneratorExit):
                host.run_at_end(self.settings.terminate)
            raise
        if host.joining:  # a joiner that arrived when the call was over
            self._check_that_the_store_is_new()
        self.completed = True
        self.page.store_port = 0
        log.debug("rank %d: the call is complete on all ranks", self.place.rank)
        # The process that serves the store may end as soon as all have said goodbye. From here on,
        # no error may prevent returning the value.
        if not host.joining:
            self.emitter.emit(Completed())
            self._tell_restarts("completed")
            with contextlib.suppress(StoreError):
                host.notice.completed()
        with contextlib.suppress(StoreError):
            run(machine.membership.say_goodbye(self.place.member, self.place.iteration))
            if self.ready and not host.monitor.serves:
                self._await_end_of_store(store)
        if not host.joining:
            host.run_at_end(self.settings.completion)
        return value

    def _tell_restarts(self, how: str) -> None:
        if self.place.rank != 0 or self.launch.agent:  # the launcher tells it itself
            return
        with contextlib.suppress(StoreError):  # lost with its server
            counts = run(self.machine.membership.restart_counts())
            if counts:
                notice(log, "%s after %s", how, describe_restarts(counts))

    def _await_end_of_store(self, store: Connection) -> None:
        """Waits until the process that serves this call's store has ended, which it does at the
        last goodbye; where it runs, its dismissal waits for that. What follows the call may use a
        store of its own on the same port, and must not connect to this one.
        """
        with contextlib.suppress(KeyTimeout):
            store.wait_for(f"{self.prefix}never", self.host.durations.barrier)

    def _check_that_the_store_is_new(self) -> None:
        """Checks that no earlier run left its records. A file outlives its run: without this check,
        the next run's ranks would find a completed job, and return at once without an error.
        """
        if self.endpoint is None and not self.launch.replacement:
            where = self.settings.store_kwargs.get("file_name", "the store")
            raise StoreError(
                f"{where} holds a job that has completed: a run needs a store of its own, so "
                "remove the file, or name another one"
            )

    def _default_sink(self) -> Sink:
        events_dir = self.launch.events_dir
        if not events_dir:
            return NullSink()
        try:
            return JsonlSink(Path(events_dir) / f"rank{self.launch.rank}-{os.getpid()}.jsonl")
        except OSError as e:
            raise ValueError(f"OUTLAST_EVENTS_DIR={events_dir!r} cannot be used: {e}") from e

    def _store_kwargs(self) -> dict[str, Any]:
        """Those of the settings. Under `outlast run` with the address of the launcher's store: from
        that store it learns that there is a wrapped call, whose dead workers it replaces.
        """
        kwargs = dict(self.settings.store_kwargs)
        if self.launch.agent and issubclass(self.settings.store_factory, TCPStore):
            kwargs.update(host_name=self.launch.host, port=self.launch.port)
        return kwargs

    def _job_serves_store(self) -> bool:
        if self.endpoint is None:
            return False
        host, port = self.endpoint
        by_launcher = self.launch.agent_store and port == self.launch.port
        return not (by_launcher and host == (self.launch.host or host))

    def _monitor_plan(self, serves: bool) -> MonitorPlan:
        return MonitorPlan(
            page=self.page,
            factory=self.settings.store_factory,
            kwargs=self.store_kwargs,
            endpoint=self.endpoint,
            serve=serves,
            ready=self.ready,
            prefix=self.prefix,
            rank=self.launch.rank,
            world_size=self.launch.world_size,
            token=self.host.token,
            rules=self.host.rules,
            durations=self.host.durations,
            logfile=self.settings.monitor_process_logfile,
            events_dir=self.launch.events_dir,
            address=self.host.iteration_store.address,
            # A member that is alone on its host has nobody else to watch it.
            host_id=self.launch.host_id,
            host_ring=is_host_server(self.endpoint) and self.launch.local_world_size > 1,
        )

    def _open_policy_store(self) -> Any:
        """The store of the job, for policies that exchange values themselves."""
        store = open_store(self.settings.store_factory, self.store_kwargs, self.endpoint)
        return PrefixStore(f"{self.prefix}policies", store)

    def _reached(self, step: int, completed: bool) -> None:
        self.page.step, self.page.pinged = max(self.page.step, step), self.emitter.clock.now()
        iteration, is_told = self.place.iteration, self.progressed_in == self.place.iteration
        further = step > self.machine.decision.history.step
        if further and not is_told and self.launch.agent and self.place.rank == 0:
            self.progressed_in = iteration
            with contextlib.suppress(StoreError):  # the monitor thread says that it is lost
                run(self.machine.membership.note_progress(iteration))
