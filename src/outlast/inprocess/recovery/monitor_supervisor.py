"""The main process's side of its monitor process: starts it, replaces a lost one, dismisses it."""

from __future__ import annotations

from collections.abc import Callable

from outlast.coordination.ops import drive, perform_on
from outlast.errors import StoreError
from outlast.events import MonitorRestarted
from outlast.inprocess.attribution import Interruption
from outlast.inprocess.distributed.connection import Connection
from outlast.inprocess.monitor.config import MonitorPlan
from outlast.inprocess.monitor.start import MonitorHandle, start_monitor
from outlast.inprocess.progress.heartbeat_thread import HeartbeatThread
from outlast.inprocess.progress.progress_notice import ProgressNotice
from outlast.inprocess.progress.shared_page import Activity
from outlast.inprocess.recovery.rank_host import RankHost
from outlast.inprocess.recovery.settings import Settings
from outlast.inprocess.recovery.state_machine import Machine
from outlast.system.arguments import seconds


class MonitorSupervisor:
    """The supervisor for one wrapped call. Starts the monitor process at once.

    `plan` makes a monitor process's plan; its argument says whether the process serves the store.

    Attributes:
        serves: whether the current monitor process serves the store of the job.
    """

    def __init__(
        self,
        settings: Settings,
        plan: Callable[[bool], MonitorPlan],
        serves: bool,
        host: RankHost,
        machine: Machine,
    ) -> None:
        self._settings, self._plan, self.serves = settings, plan, serves
        self._host, self._membership, self._page = host, machine.membership, host.page
        self._heartbeat: HeartbeatThread | None = None
        self._lost = False
        self._handle: MonitorHandle = start_monitor(plan(serves))

    @property
    def pid(self) -> int:
        """Process ID of the current monitor process."""
        return self._handle.pid

    @property
    def endpoint(self) -> tuple[str, int] | None:
        """Host and port of the store that the monitor process has reached, or serves."""
        return self._handle.endpoint

    def start_heartbeat(self, control: Connection) -> None:
        """Starts the heartbeat thread, and has the monitor process watch the library's threads.

        `control`, the connection of the function's thread, is broken off if it hangs for
        `barrier_timeout`.
        """

        def report_loss() -> None:
            self._lost = True
            fault = self._host.fault(
                self._page.iteration,
                Interruption.EXCEPTION,
                f"its monitor process {self._handle.pid} ended",
            )
            try:
                drive(self._membership.report_fault(fault), perform_on(control))
            except StoreError:
                return  # the monitor thread also notices, and tells the function's thread

        timeouts = self._settings.timeouts
        patience = seconds(timeouts.barrier_timeout)
        host = self._host
        notice = ProgressNotice(
            self._page,
            host.atomic_section.interrupter,
            host.clock,
            host.emitter.host,
            seconds(timeouts.soft),
        )

        def every_interval() -> None:
            control.break_off_overdue(patience)
            if host.atomic_section.interrupter.in_debugger():  # its user takes their time
                self._page.progress = self._page.pinged = host.clock.now()
            notice.check()

        self._heartbeat = HeartbeatThread(
            self._page,
            self._host.clock,
            seconds(timeouts.progress_watchdog_interval),
            self._handle.socket,
            report_loss,
            host.atomic_section.interrupter.blocked_in,
            every_interval,
        )
        self._page.function_thread = host.atomic_section.interrupter.native_id
        self._page.thread_1 = self._heartbeat.native_id
        self._page.thread_2 = self._host.monitor_thread.native_id
        self._handle.watch_threads()

    def replace_if_lost(self, control: Connection) -> None:
        """Replaces a lost monitor process; called in the function's thread, between iterations.

        The new one does not serve the store: the lost store's contents are gone.
        """
        if not self._lost:
            return
        self.stop_heartbeat()
        self._handle.socket.close()
        self._handle.reap()
        self.serves = False
        self._handle = start_monitor(self._plan(False))
        self._lost = False
        self._host.emitter.emit(MonitorRestarted())
        self.start_heartbeat(control)

    def stop_heartbeat(self) -> None:
        """Ends the heartbeat thread."""
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None

    def dismiss(self, *, completed: bool) -> None:
        """Dismisses the monitor process at the end of the call. If the call has not completed on
        all ranks, they may need the store that this process serves as long as they run.
        """
        self._page.activity = Activity.DONE
        patience = seconds(self._settings.timeouts.barrier_timeout)
        if (self.serves and not completed) or self._page.store_port:
            patience = 0.0
        self._handle.dismiss(patience)
