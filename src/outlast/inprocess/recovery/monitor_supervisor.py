"""The main process's side of its monitor process: starts it, replaces a lost one, dismisses it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from outlast.clock import Clock
from outlast.events.emitter import Emitter
from outlast.events.types import MonitorRestarted
from outlast.inprocess.interruption.in_flight import LeavingWatch
from outlast.inprocess.interruption.interrupter import Interrupter
from outlast.inprocess.monitor.heartbeat_thread import HeartbeatThread
from outlast.inprocess.monitor.reports import MonitorPlan
from outlast.inprocess.monitor.shared_page import NOTICE_AFTER_S, Activity, SharedPage
from outlast.inprocess.monitor.start import start_monitor
from outlast.inprocess.nccl import warn_of_conditions
from outlast.inprocess.timeouts import Durations

log = logging.getLogger("outlast.inprocess")


class ProgressNotice:
    """One line for a rank that makes no progress, long before its timeout.

    The rank that hangs names its place. Ranks that wait for others in torch are silent, except rank
    0: its line is the only one if all ranks wait. A process that cannot run Python code at all
    writes nothing; its monitor process does (`FrozenNotice`). `soft_timeout` is in seconds.
    """

    def __init__(
        self,
        page: SharedPage,
        interrupter: Interrupter,
        clock: Clock,
        host: str,
        soft_timeout: float,
        write: Callable[[str], None] = log.warning,
    ) -> None:
        self._page, self._interrupter, self._clock = page, interrupter, clock
        self._host, self._soft_timeout, self._write = host, soft_timeout, write
        self._after = NOTICE_AFTER_S
        self._told: float | None = None  # the progress after which the line was written

    def check(self) -> None:
        """Writes one line per hang; after a long step that ended, only for a longer one."""
        page = self._page
        progress = page.progress
        if self._told is not None and progress != self._told:
            self._after = max(self._after, 2 * (progress - self._told))
            self._told = None
        idle = self._clock.now() - progress
        declared = page.long_limit != 0
        in_time = declared or idle < self._after
        if page.activity != Activity.FUNCTION or in_time or self._told is not None:
            return
        self._told = progress
        where = self._interrupter.user_place() or "an unknown place"
        who = f"rank {page.rank} on {self._host}"
        if not self._interrupter.waits_for_others():
            limit = page.soft_limit or self._soft_timeout
            idle_s = f"{idle:.0f} s"
            self._write(
                f"{who}: no progress for {idle_s}, at {where}; all ranks restart after {limit:g} s"
            )
        elif page.rank == 0:
            self._write(f"{who} has waited for other ranks for {idle:.0f} s, at {where}")


class MonitorSupervisor:
    """The supervisor for one wrapped call. Starts the monitor process at once, with the plan that
    `plan` makes; its argument says whether the process serves the store of the job, as the first
    one does if it `serves`. `endpoint` is where the store is.
    """

    _report_loss: Callable[[str], None]
    _leaving: LeavingWatch

    def __init__(
        self,
        plan: Callable[[bool], MonitorPlan],
        serves: bool,
        durations: Durations,
        page: SharedPage,
        interrupter: Interrupter,
        emitter: Emitter,
    ) -> None:
        self._plan, self.serves, self._durations = plan, serves, durations
        self._page, self._interrupter, self._emitter = page, interrupter, emitter
        self._heartbeat: HeartbeatThread | None = None
        self._lost = False
        self._handle = start_monitor(plan(serves))
        self.endpoint = self._handle.endpoint

    @property
    def pid(self) -> int:
        return self._handle.pid

    def wake(self) -> None:
        self._handle.wake()

    def watch(
        self,
        monitor_thread: int,
        report_loss: Callable[[str], None],
        report_leaving: Callable[[BaseException], None],
    ) -> None:
        """Begins to watch the monitor process, which watches this package's threads in return: the
        one with the ID `monitor_thread`, and the heartbeat thread, which calls `report_loss` with
        the cause when the process has ended, and `report_leaving`: see `LeavingWatch`.
        """
        self._leaving = LeavingWatch(self._interrupter, report_leaving)
        self._page.thread_2, self._report_loss = monitor_thread, report_loss
        self._start_heartbeat()

    def _start_heartbeat(self) -> None:
        page, interrupter, clock = self._page, self._interrupter, self._emitter.clock
        host, soft = self._emitter.host, self._durations.soft
        notice = ProgressNotice(page, interrupter, clock, host, soft)

        def every_interval() -> None:
            if interrupter.in_debugger():  # its user takes their time
                page.progress = page.pinged = clock.now()
            notice.check()
            warn_of_conditions()

        def look() -> None:
            if page.activity == Activity.FUNCTION:
                self._leaving.look(page.iteration)

        def lost() -> None:
            self._lost = True
            self._report_loss(f"its monitor process {self.pid} ended")

        interval = self._durations.progress_interval
        self._heartbeat = HeartbeatThread(
            page,
            clock,
            interval,
            self._handle.socket,
            on_monitor_end=lost,
            blocked_in=interrupter.blocked_in,
            every_interval=every_interval,
            look=look,
        )
        page.function_thread = interrupter.native_id
        page.thread_1 = self._heartbeat.native_id
        self._handle.watch_threads()

    def replace_if_lost(self) -> None:
        """In the function's thread, between iterations: replaces a lost monitor, not its store."""
        if not self._lost:
            return
        self.stop_heartbeat()
        self._handle.socket.close()
        self._handle.reap()
        self.serves = False
        self._handle = start_monitor(self._plan(False))
        self._lost = False
        self._emitter.emit(MonitorRestarted())
        self._start_heartbeat()

    def stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None

    def dismiss(self, *, completed: bool) -> None:
        """Dismisses the monitor; unless `completed`, other ranks may still need its store."""
        self._page.activity = Activity.DONE
        stays = (self.serves and not completed) or self._page.store_port
        self._handle.dismiss(0.0 if stays else self._durations.barrier)
