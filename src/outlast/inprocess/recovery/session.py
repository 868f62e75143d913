"""One call of a wrapped function: everything it needs is set up, and given back whatever happens.

Order, coming in: monitor process (which may serve the store), connections, signal handler,
watcher and watchdog threads. Going out, the reverse; the monitor process is dismissed last, since
until then the end of this process is a fault that it reports.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from outlast.clock import MonotonicClock
from outlast.coordination.ops import Link, Op, drive, perform_on
from outlast.errors import RestartAbort, StoreError
from outlast.events import Completed, Emitter, JsonlSink, Lost, MonitorRestarted, NullSink, Sink
from outlast.inprocess.abort import Abort
from outlast.inprocess.call_wrapper import CallWrapper
from outlast.inprocess.compose import iter_parts
from outlast.inprocess.distributed.connection import Connection, connect
from outlast.inprocess.environment import exported, read_launch
from outlast.inprocess.interruption.atomic import AtomicGate
from outlast.inprocess.interruption.interrupter import Interrupter
from outlast.inprocess.interruption.monitor_thread import Watcher
from outlast.inprocess.monitor.plan import MonitorPlan
from outlast.inprocess.monitor.start import MonitorHandle, start_monitor
from outlast.inprocess.observers import observers
from outlast.inprocess.progress.adaptive import Adaptive, GapEstimator
from outlast.inprocess.progress.heartbeat_thread import Watchdog
from outlast.inprocess.progress.shared_page import Activity, SharedPage
from outlast.inprocess.recovery.iteration_store import local_address
from outlast.inprocess.recovery.launcher_notice import Announcement
from outlast.inprocess.recovery.machine import Machine
from outlast.inprocess.recovery.rank_host import RankHost
from outlast.inprocess.recovery.settings import Settings
from outlast.inprocess.state import State

__all__ = ["run_call"]

_calls = itertools.count()
_running = threading.Lock()


def run_call(
    settings: Settings,
    function: Callable[[CallWrapper], Any],
    name: str,
    sink: Sink | None,
) -> Any:
    """Runs `function` under the wrapper until every rank has completed it.

    Args:
        settings: of the wrapper.
        function: gets this iteration's `CallWrapper`.
        name: of the user's function, for errors.
        sink: where events go; `None` for a file in `OUTLAST_EVENTS_DIR`, if that is set.

    Raises:
        ValueError: if `torch.distributed` is initialized already, or a wrapped call is running.
    """
    if dist.is_available() and dist.is_initialized():
        raise ValueError(
            f"{name}: torch.distributed is initialized already; the wrapped function makes its "
            "own process group, in every iteration"
        )
    if not _running.acquire(blocking=False):
        raise ValueError(f"{name}: another wrapped call is running; wrapped calls do not nest")
    try:
        return _Session(settings, function, sink).run()
    finally:
        _running.release()


class _Session:
    def __init__(
        self, settings: Settings, function: Callable[[CallWrapper], Any], sink: Sink | None
    ) -> None:
        self.settings, self.function = settings, function
        self.launch = read_launch()
        self.number = next(_calls)
        self.prefix = f"outlast/{self.launch.attempt}/{self.number}/"
        self.clock = MonotonicClock()
        events_dir = self.launch.events_dir
        if sink is None and events_dir:
            try:
                sink = JsonlSink(Path(events_dir) / f"rank{self.launch.rank}-{os.getpid()}.jsonl")
            except OSError as e:
                raise ValueError(f"OUTLAST_EVENTS_DIR={events_dir!r} cannot be used: {e}") from e
        self.emitter = Emitter(sink or NullSink(), clock=self.clock)
        self.emitter.place(rank=self.launch.rank)
        self.endpoint = settings.store_factory.endpoint(**settings.store_kwargs)  # type: ignore[attr-defined]
        served_here = self._is_served_here()
        self.serves = served_here and self.launch.rank == 0 and not self.launch.replacement
        self.ready = f"{self.prefix}served" if served_here else ""
        self.page = SharedPage()
        self.interrupter = Interrupter()
        self.gate = AtomicGate(self.interrupter)
        self.monitor: MonitorHandle
        self.watchdog: Watchdog
        self.announcement: Announcement
        self.monitor_ended = False
        self.completed = False
        self.froze = False

    def run(self) -> Any:
        with ExitStack() as stack:
            stack.callback(self.emitter.sink.close)
            stack.callback(self.page.close)
            stack.enter_context(exported())
            host = self._host(local_address(self.endpoint))
            self.monitor = start_monitor(self._plan(host))
            stack.callback(self._dismiss_monitor)
            stack.callback(host.iteration_store.close)
            stack.callback(host.releaser.join)
            self.endpoint = self.monitor.endpoint
            control = self._connect()
            stack.callback(control.close)
            stack.enter_context(_frozen_heap(self))
            self.interrupter.install()
            stack.callback(self.interrupter.restore)
            abort = self.settings.abort
            host.watcher = Watcher(
                self._connect(),
                self.gate,
                self.interrupter,
                self.page,
                lambda again: _run_abort(abort, host, again),
                self.emitter,
                renew=self._connect,
            )
            stack.callback(host.let_go)
            stack.callback(lambda: host.watcher.close(5.0))
            self.announcement = Announcement(
                control, self.number, names_processes=self.launch.agent
            )
            self.announcement.running()
            self._start_watchdog(host, control)
            stack.callback(lambda: self.watchdog.close())
            host.repair = lambda: self._repair(host, control)
            host.call_function = self._call_function
            if abort is not None:
                for part in iter_parts(abort):
                    if isinstance(part, Abort):
                        part.prepare()
            return self._drive(host, control)

    def _drive(self, host: RankHost, control: Connection) -> Any:
        link = Link(self.prefix)
        machine = Machine(host, link, self.launch.world_size)
        direct = perform_on(control)

        def perform(op: Op) -> Any:
            return host.watcher.wait_for(op) if op.name == "wait_for" else direct(op)

        try:
            value = drive(machine.run(), perform)
        except BaseException as e:
            self.emitter.emit(Lost(reason=repr(e)))
            if isinstance(e, RestartAbort):
                with contextlib.suppress(RuntimeError):  # the store is lost: the error is told
                    self.announcement.aborted()
            if not isinstance(e, StoreError | GeneratorExit):
                self._end_wait(host)
            raise
        if host.joining:  # a newcomer that came when all was over
            self._check_that_the_store_is_new()
        self.completed = True
        self.page.store_port = 0
        if not host.joining:
            self.emitter.emit(Completed())
        # Whoever serves the store may be gone as soon as all have said goodbye; and nothing may
        # take the value away any more.
        with contextlib.suppress(StoreError, RuntimeError):
            if not host.joining:
                self.announcement.completed()
        with contextlib.suppress(StoreError):
            drive(machine.membership.say_goodbye(machine.member, machine.iteration), direct)
        return value

    def _check_that_the_store_is_new(self) -> None:
        """A file outlives its run: the ranks of the next run find a job that has completed, and
        would end at once, without a word.
        """
        if self.endpoint is None and not self.launch.replacement:
            where = self.settings.store_kwargs.get("file_name", "the store")
            raise StoreError(
                f"{where} holds a job that has completed: a run needs a store of its own, so "
                "remove the file, or name another one"
            )

    def _end_wait(self, host: RankHost) -> None:
        """This rank leaves while its watcher may wait for something that others decide later."""
        if host.guard is not None:
            host.guard.left.set()
        else:
            host.watcher.break_off()

    # -- coming up ---------------------------------------------------------------------------

    def _is_served_here(self) -> bool:
        """Whether the job serves its store itself, anew for every call."""
        if self.endpoint is None:
            return False
        host, port = self.endpoint
        by_launcher = self.launch.agent_store and port == self.launch.port
        return not (by_launcher and host == (self.launch.host or host))

    def _host(self, address: str) -> RankHost:
        return RankHost(
            self.settings,
            self.launch,
            self.page,
            self.gate,
            self.interrupter,
            self.emitter,
            self.prefix,
            address,
        )

    def _plan(self, host: RankHost) -> MonitorPlan:
        s = self.settings
        return MonitorPlan(
            page=self.page,
            factory=s.store_factory,  # type: ignore[arg-type]
            kwargs=dict(s.store_kwargs),
            endpoint=self.endpoint,
            serve=self.serves,
            ready=self.ready,
            prefix=self.prefix,
            rank=self.launch.rank,
            world_size=self.launch.world_size,
            token=host.token,
            interval=s.monitor_process_interval.total_seconds(),
            heartbeat=s.heartbeat_timeout.total_seconds(),
            soft=s.soft.total_seconds(),
            hard=s.hard_timeout.total_seconds(),
            grace=s.termination_grace_time.total_seconds(),
            patience=s.barrier_timeout.total_seconds(),
            logfile=s.monitor_process_logfile,
            events_dir=self.launch.events_dir,
            address=host.iteration_store.address,
        )

    def _connect(self) -> Connection:
        return connect(
            self.settings.store_factory,  # type: ignore[arg-type]
            self.settings.store_kwargs,
            self.endpoint,
            self.settings.barrier_timeout.total_seconds(),
            self.ready,
        )

    def _start_watchdog(self, host: RankHost, control: Connection) -> None:
        def lost() -> None:
            self.monitor_ended = True
            fault = host.fault(
                self.page.iteration, "EXCEPTION", f"its monitor process {self.monitor.pid} ended"
            )
            try:
                drive(self._membership(host).report_fault(fault), perform_on(control))
            except StoreError:
                return  # the watcher sees the same, and tells the function's thread

        interval = self.settings.progress_watchdog_interval.total_seconds()
        patience = self.settings.barrier_timeout.total_seconds()
        self.watchdog = Watchdog(
            self.page,
            self.clock,
            interval,
            self.monitor.socket,
            lost,
            lambda: control.end_overdue(patience),
        )
        self.page.thread_1 = self.watchdog.native_id
        self.page.thread_2 = host.watcher.native_id
        self.monitor.watch_threads()

    def _membership(self, host: RankHost) -> Any:
        return Machine(host, Link(self.prefix), self.launch.world_size).membership

    def _repair(self, host: RankHost, control: Connection) -> None:
        """Between two iterations, in the function's thread: a lost monitor process is replaced.
        It cannot serve the store anew: what was in that is gone.
        """
        if not self.monitor_ended:
            return
        self.watchdog.close()
        self.monitor.socket.close()
        self.monitor.reap()
        self.serves = False
        self.monitor = start_monitor(self._plan(host))
        self.monitor_ended = False
        self.emitter.emit(MonitorRestarted())
        self._start_watchdog(host, control)

    # -- the function ------------------------------------------------------------------------

    def _call_function(self, state: State) -> Any:
        soft = self.settings.soft_timeout
        call = CallWrapper(
            state,
            self.page,
            self.gate,
            self.interrupter,
            self.clock,
            GapEstimator(soft) if isinstance(soft, Adaptive) else None,
            self.monitor.pid,
        )
        for observer in observers():
            observer.entered(call)
        return self.function(call)

    # -- going out ---------------------------------------------------------------------------

    def _dismiss_monitor(self) -> None:
        self.page.activity = Activity.DONE
        patience = self.settings.barrier_timeout.total_seconds()
        if (self.serves and not self.completed) or self.page.store_port:
            patience = 0.0  # the others may need the store for as long as they run
        self.monitor.dismiss(patience)


def _run_abort(abort: Abort | None, host: RankHost, again: bool) -> None:
    if not again:
        host.releaser.hold()
    if abort is None:
        return
    for part in iter_parts(abort) if again else (abort,):
        if again and isinstance(part, Abort):
            part.again(host.state.copy())
        elif not again:
            part(host.state.copy())


@contextmanager
def _frozen_heap(session: _Session) -> Iterator[None]:
    """What is alive before the function is entered is left out of garbage collections until the
    end of the call: one after an iteration is then short, and its time does not grow with the
    size of the program. Not where the program has frozen its heap itself.
    """
    session.froze = not gc.get_freeze_count()
    try:
        yield
    finally:
        if session.froze:
            gc.unfreeze()
