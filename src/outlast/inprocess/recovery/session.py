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
from outlast.coordination.ops import Link, Op, drive, perform_on
from outlast.coordination.records import process_name
from outlast.coordination.stores.store import KeyTimeout
from outlast.coordination.training_step import observed_steps
from outlast.errors import StoreError
from outlast.events import Completed, Emitter, JsonlSink, Lost, NullSink, Sink
from outlast.events.restart_causes import describe_restarts
from outlast.inprocess.abort import Abort
from outlast.inprocess.call_wrapper import CallWrapper
from outlast.inprocess.compose import iter_parts
from outlast.inprocess.distributed.connection import Connection, connect
from outlast.inprocess.distributed.torch_log import QuietTorchLog
from outlast.inprocess.environment import exported, is_host_server, read_launch
from outlast.inprocess.interruption.atomic import AtomicSection
from outlast.inprocess.interruption.interrupter import Interrupter
from outlast.inprocess.interruption.monitor_thread import MonitorThread
from outlast.inprocess.monitor.config import MonitorPlan
from outlast.inprocess.observers import observers
from outlast.inprocess.progress.adaptive_timeout import Adaptive, GapEstimator
from outlast.inprocess.progress.shared_page import SharedPage
from outlast.inprocess.recovery.call_control import CallControl
from outlast.inprocess.recovery.launcher_notice import LauncherNotice
from outlast.inprocess.recovery.monitor_supervisor import MonitorSupervisor
from outlast.inprocess.recovery.rank_host import RankHost
from outlast.inprocess.recovery.settings import Settings, assignment_parts
from outlast.inprocess.recovery.state_machine import Machine
from outlast.inprocess.running_call import set_running_call
from outlast.inprocess.state import State
from outlast.inprocess.store import PrefixStore, TCPStore
from outlast.system.arguments import seconds
from outlast.system.error_text import describe
from outlast.system.fast_exit import exit_fast
from outlast.system.notices import notice
from outlast.system.sockets import address_towards

log = logging.getLogger("outlast.inprocess")

_calls = itertools.count()
_running = threading.Lock()


def run_call(
    settings: Settings, function: Callable[[CallWrapper], Any], name: str, sink: Sink | None
) -> Any:
    """Runs `function` under the wrapper until every rank has completed it.

    `name` is the name of the user's function, for errors. Without a sink, events go to a file in
    `OUTLAST_EVENTS_DIR`, if that is set.

    Raises:
        ValueError: if `torch.distributed` is already initialized, or a wrapped call is running.
    """
    if dist.is_available() and dist.is_initialized():
        raise ValueError(
            f"{name}: torch.distributed is initialized already; the wrapped function makes its "
            "own process group, in every iteration"
        )
    if not _running.acquire(blocking=False):
        raise ValueError(f"{name}: another wrapped call is running; wrapped calls do not nest")
    exit_fast()
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
        self.store_kwargs = self._store_kwargs()
        self.endpoint = settings.store_factory.endpoint(**self.store_kwargs)  # type: ignore[attr-defined]
        address = self.launch.host_address or address_towards(self.endpoint)
        self.emitter = Emitter(self._default_sink() if sink is None else sink, clock=self.clock)
        self.emitter.place(rank=self.launch.rank)
        self.ready = f"{self.prefix}served" if self._job_serves_store() else ""
        self.page = SharedPage()
        self.interrupter = Interrupter()
        self.atomic_section = AtomicSection(self.interrupter)
        self.host = RankHost(
            settings,
            self.launch,
            self.page,
            self.atomic_section,
            self.emitter,
            self.number,
            self.prefix,
            address,
        )
        self.machine = Machine(self.host, Link(self.prefix), self.launch.world_size)
        self.monitor: MonitorSupervisor
        self.notice: LauncherNotice
        self.running: CallControl
        self.completed = False
        self._policies: Connection | None = None

    def run(self) -> Any:
        host = self.host
        with ExitStack() as stack:
            stack.callback(self.emitter.sink.close)
            stack.callback(self.page.close)
            stack.enter_context(observed_steps(self._reached))
            stack.enter_context(exported())
            first = self.launch.rank == 0 and not self.launch.replacement
            self.monitor = MonitorSupervisor(
                self.settings, self._monitor_plan, bool(self.ready) and first, host, self.machine
            )
            stack.callback(lambda: self.monitor.dismiss(completed=self.completed))
            stack.callback(host.iteration_store.close)
            # After the monitor thread, which runs the abort, has ended.
            stack.callback(lambda: host.releaser.end())
            self.endpoint = self.monitor.endpoint
            control = self._connect()
            stack.callback(control.close)
            self.interrupter.install()
            stack.callback(self.interrupter.restore)
            host.monitor_thread = MonitorThread(
                self._connect(),
                self.atomic_section,
                self.interrupter,
                self.page,
                self._run_abort,
                self.emitter,
                reconnect=self._connect,
            )
            stack.callback(host.torch_log.end)
            stack.callback(host.release)
            stack.callback(lambda: host.monitor_thread.close(5.0))
            launch = self.launch
            process = process_name(launch.host_id, os.getpid()) if launch.agent else ""
            self.notice = LauncherNotice(control, self.number, self.prefix, process=process)
            self.notice.running()
            self.monitor.start_heartbeat(control)
            stack.callback(self.monitor.stop_heartbeat)
            log.debug(
                "rank %d of %d: call %d begins in process %d, with monitor process %d",
                self.launch.rank,
                self.launch.world_size,
                self.number,
                os.getpid(),
                self.monitor.pid,
            )
            host.replace_lost_monitor = lambda: self.monitor.replace_if_lost(control)
            host.call_function = self._call_function
            host.policy_store = lambda: self._policy_store(stack)
            for assignment in assignment_parts(self.settings.rank_assignment):
                assignment.prepare()
            host.announce_abort = self._announce_abort
            for part in self._abort_parts():
                part.prepare()
            with ExitStack() as at_end:
                self.running = CallControl(host, self.machine.membership, control, at_end)
                at_end.callback(set_running_call, None)
                set_running_call(self.running)
                return self._drive(control)

    def _drive(self, control: Connection) -> Any:
        machine, host = self.machine, self.host
        direct = perform_on(control)

        def perform(op: Op) -> Any:
            return host.monitor_thread.wait_for(op) if op.name == "wait_for" else direct(op)

        try:
            value = drive(machine.run(), perform)
        except BaseException as e:
            log.debug("rank %d: leaving the call: %r", host.state.rank, e)
            self.emitter.emit(Lost(reason=describe(e)))
            if not isinstance(e, StoreError | GeneratorExit):
                self._end_watch()
                self._tell_restarts("ended", direct)
            if not isinstance(e, GeneratorExit):
                host.run_at_end(self.settings.terminate)
            raise
        if host.joining:  # a joiner that arrived when the call was over
            self._check_that_the_store_is_new()
        self.completed = True
        self.page.store_port = 0
        log.debug("rank %d: the call is complete on all ranks", host.state.rank)
        if not host.joining:
            self.emitter.emit(Completed())
            self._tell_restarts("completed", direct)
        # The process that serves the store may end as soon as all have said goodbye. From here on,
        # no error may prevent returning the value.
        with contextlib.suppress(StoreError, RuntimeError):
            if not host.joining:
                self.notice.completed()
        with contextlib.suppress(StoreError), QuietTorchLog():
            drive(machine.membership.say_goodbye(machine.member, machine.iteration), direct)
            if self.ready and not self.monitor.serves:
                self._await_end_of_store(control)
        if not host.joining:
            host.run_at_end(self.settings.completion)
        return value

    def _tell_restarts(self, how: str, perform: Callable[[Op], Any]) -> None:
        if self.host.state.rank != 0 or self.launch.agent:  # the launcher tells it itself
            return
        with contextlib.suppress(StoreError, RuntimeError):  # lost with its server
            counts = drive(self.machine.membership.restart_counts(), perform)
            if counts:
                notice(log, "%s after %s", how, describe_restarts(counts))

    def _await_end_of_store(self, control: Connection) -> None:
        """Waits until the process that serves this call's store has ended, which it does at the
        last goodbye; where it runs, its dismissal waits for that. What follows the call may use a
        store of its own on the same port, and must not connect to this one.
        """
        with contextlib.suppress(StoreError, KeyTimeout):
            control.wait_for(f"{self.prefix}never", seconds(self.settings.timeouts.barrier_timeout))

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

    def _end_watch(self) -> None:
        """Ends the watch when this rank leaves while its monitor thread waits for the others."""
        if self.host.watch is not None:
            self.host.watch.left.set()
        else:
            self.host.monitor_thread.break_off()

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
        factory, kwargs = self.settings.store_factory, dict(self.settings.store_kwargs)
        if self.launch.agent and isinstance(factory, type) and issubclass(factory, TCPStore):
            kwargs.update(host_name=self.launch.host, port=self.launch.port)
        return kwargs

    def _job_serves_store(self) -> bool:
        """Whether the job serves its store itself, a new one for every call."""
        if self.endpoint is None:
            return False
        host, port = self.endpoint
        by_launcher = self.launch.agent_store and port == self.launch.port
        return not (by_launcher and host == (self.launch.host or host))

    def _monitor_plan(self, serves: bool) -> MonitorPlan:
        s, t = self.settings, self.settings.timeouts
        return MonitorPlan(
            page=self.page,
            factory=s.store_factory,  # type: ignore[arg-type]
            kwargs=self.store_kwargs,
            endpoint=self.endpoint,
            serve=serves,
            ready=self.ready,
            prefix=self.prefix,
            rank=self.launch.rank,
            world_size=self.launch.world_size,
            token=self.host.token,
            rules=self.host.rules,
            interval=seconds(t.monitor_process_interval),
            heartbeat=seconds(t.heartbeat_timeout),
            soft=seconds(t.soft),
            hard=seconds(t.hard_timeout),
            ping=seconds(t.ping_timeout),
            grace=seconds(t.termination_grace_time),
            patience=seconds(t.barrier_timeout),
            logfile=s.monitor_process_logfile,
            events_dir=self.launch.events_dir,
            address=self.host.iteration_store.address,
            # A member that is alone on its host has nobody else to watch it.
            host_id=self.launch.host_id,
            host_ring=is_host_server(self.endpoint) and self.launch.local_world_size > 1,
        )

    def _connect(self) -> Connection:
        return connect(
            self.settings.store_factory,  # type: ignore[arg-type]
            self.store_kwargs,
            self.endpoint,
            seconds(self.settings.timeouts.barrier_timeout),
            self.ready,
        )

    def _policy_store(self, stack: ExitStack) -> Any:
        """The store of the job, for policies that exchange values themselves; one connection."""
        if self._policies is None:
            self._policies = self._connect()
            stack.callback(self._policies.close)
        return PrefixStore(f"{self.prefix}policies", self._policies.torch_store)

    def _call_function(self, state: State) -> Any:
        soft = self.settings.timeouts.soft_timeout
        call = CallWrapper(
            state,
            self.page,
            self.atomic_section,
            self.clock,
            GapEstimator(soft) if isinstance(soft, Adaptive) else None,
            self.monitor.pid,
        )
        self.running.wrapper = call
        for observer in observers():
            observer.entered(call)
        return self.function(call)

    def _abort_parts(self) -> list[Abort]:
        abort = self.settings.abort
        parts = () if abort is None else iter_parts(abort)
        return [part for part in parts if isinstance(part, Abort)]

    def _announce_abort(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is lost
            self.notice.aborted(reports=self.host.reported_cause)

    def _reached(self, step: int, completed: bool) -> None:
        self.page.step, self.page.pinged = max(self.page.step, step), self.clock.now()

    def _run_abort(self, again: bool) -> None:
        """Called in the monitor thread."""
        if again:
            for part in self._abort_parts():
                part.again(self.host.state.copy())
            return
        self.host.torch_log.begin()
        self.host.releaser.hold()
        if self.settings.abort is not None:
            self.settings.abort(self.host.state.copy())
