"""The event loop of the monitor process: watches the main process, and reacts to its events.

* The main process ends: its pidfd becomes readable. The death is reported, and the others restart.
  So it is when SIGKILL has had no effect for long.
* It makes no progress: the timestamps in shared memory grow old (`timeouts.py`).
* Another member falls silent: its heartbeat stops (`heartbeat_ring.py`).
* The main process dismisses the monitor, which exits unless other ranks need a store it serves.
"""

from __future__ import annotations

import math
import os
import select
import socket
from pathlib import Path
from typing import Any

from outlast.clock import MonotonicClock
from outlast.coordination.barrier import done_key
from outlast.coordination.membership import decision_key
from outlast.errors import StoreError
from outlast.events.emitter import Emitter, JsonlSink, NullSink, Sink
from outlast.inprocess.monitor.cpu_time import CpuTime
from outlast.inprocess.monitor.heartbeat_ring import HeartbeatRing
from outlast.inprocess.monitor.native_frames import NativeFrames
from outlast.inprocess.monitor.reports import FaultReports, MonitorPlan, StoreAccess, write_line
from outlast.inprocess.monitor.shared_page import Activity
from outlast.inprocess.monitor.timeouts import FrozenNotice, IdleRanks, ProgressTimeouts
from outlast.inprocess.store import TCPStore
from outlast.system.processes import is_dying, open_parent, open_thread, readable

# A wait that ends so much too late: this process was stopped, or the machine is overloaded.
_STOPPED_S = 2.0

_STUCK_S = 10.0
"""After which a main process that is dying counts as dead: it may wait in the kernel for ever."""

_OBSERVER = 1 << 40
"""The member ID of a monitor whose main process is not a member: after all others in the ring."""


class MonitorLoop:
    """Runs in the monitor process. `main` is the pid of the main process, `end` the socket to it;
    `server` serves the store as long as the object lives.
    """

    def __init__(self, plan: MonitorPlan, main: int, end: socket.socket, server: Any) -> None:
        self._plan, self._page, self._main, self._end = plan, plan.page, main, end
        self._server = server
        self._clock = MonotonicClock()
        self._poll = select.poll()
        self._pidfd = open_parent(main)
        if self._pidfd is not None:
            self._poll.register(self._pidfd, select.POLLIN)
        self._main_alive = self._pidfd is not None
        self._poll.register(end, select.POLLIN)
        self._dying_since = math.inf
        self._threads: set[int] = set()  # pidfds of threads of the main process
        self._store = StoreAccess(plan)
        self._forgot = 0  # the iteration before which old ones were forgotten
        emitter = Emitter(_sink(plan))
        self._reports = FaultReports(plan, main, emitter, self._store)
        self._frozen = FrozenNotice(plan, main, self._clock, emitter.host)
        # The other ranks wait for the barrier timeout, at most, for one that is told to leave.
        spare_s = (plan.durations.barrier - plan.durations.hard - plan.durations.grace) / 2
        self._frames = NativeFrames(main, self._clock, self._poll, spare_s)
        self._timeouts = ProgressTimeouts(
            plan,
            main,
            self._clock,
            self._reports,
            self._pidfd,
            IdleRanks(
                self._page,
                self._store,
                self._clock,
                confirm=3 * plan.durations.monitor_interval,
                again=plan.durations.soft,
            ),
            CpuTime(main, self._clock),
            self._frames,
        )
        self._ring = HeartbeatRing(plan, self._clock, self._store, self._reports)

    def run(self) -> None:
        names = f"monitor process {os.getpid()} of process {self._main}"
        write_line(f"{names}, rank {self._plan.rank} of {self._plan.world_size}: start")
        try:
            self._run()
        finally:
            self._frames.close()
            if self._pidfd is not None:
                os.close(self._pidfd)
            write_line(f"{names}: end")

    def _run(self) -> None:
        self._store.connect(give_up=self._is_over)
        dismissed = self._watch_main_process()
        how = "was dismissed" if dismissed else "main process ended"
        write_line(f"{how} in iteration {self._page.iteration}")
        if not self._main_alive and self._page.activity != Activity.DONE:
            self._reports.death()
        elif dismissed and self._page.member < 0:
            self._reports.departure()
        if self._pidfd is not None:
            self._replace_iteration_store(None if self._main_alive else self._pidfd)
        if self._server is not None and self._store.available:
            self._stay_until(done_key("goodbye"), math.inf)

    def _is_over(self) -> bool:
        """Whether the main process has ended, or dismissed this one."""
        ready = [fd for fd, _ in self._poll.poll(0)]
        if self._pidfd is None or self._pidfd in ready:
            return True
        if self._end.fileno() not in ready:
            return False
        messages = self._end.recv(64, socket.MSG_PEEK)
        return not messages or b"B" in messages

    def _watch_main_process(self) -> bool:
        """Runs until the main process ends or dismisses this one; returns whether dismissed."""
        while self._main_alive:
            ready = self._wait()
            if self._pidfd in ready or self._is_death_of_threads(ready):
                self._main_alive = False
            elif self._end.fileno() in ready:
                message = self._end.recv(1)
                if message == b"B":
                    return True
                if message == b"T":
                    self._watch_threads()
                elif not message:
                    # Closed without a message: the main process is ending. Its descriptors are
                    # closed before its pidfd becomes readable.
                    self._poll.unregister(self._end)
                # After b"W", the next pause is by the timeouts that are in force now.
            else:
                self._timeouts.check()
                self._frozen.check()
                self._ring.beat()
                self._forget()
                self._main_alive = not self._is_stuck()
        return False

    def _forget(self) -> None:
        """Deletes the job's old keys while rank 0 is in its function: no restart waits for it."""
        page = self._page
        in_function = page.rank == 0 and page.activity == Activity.FUNCTION
        if in_function and page.iteration > self._forgot:
            self._forgot = page.iteration
            self._store.perform(self._store.membership.forget_before(self._forgot))

    def _wait(self) -> list[int]:
        began = self._clock.now()
        due = min(self._ring.next_beat, self._timeouts.next_check())
        pause = max(0.001, min(due - began, self._plan.durations.monitor_interval))
        ready = [fd for fd, _ in self._poll.poll(pause * 1000)]
        if self._clock.now() - began - pause > _STOPPED_S:
            self._timeouts.continued()
            self._ring.continued()
            self._dying_since = math.inf
        return ready

    def _watch_threads(self) -> None:
        for tid in (self._page.thread_1, self._page.thread_2):
            descriptor = open_thread(tid) if tid else None
            if descriptor is not None:
                self._threads.add(descriptor)
                self._poll.register(descriptor, select.POLLIN)

    def _is_death_of_threads(self, ready: list[int]) -> bool:
        """Whether watched threads have ended because the whole main process is dying."""
        ended = self._threads.intersection(ready)
        for descriptor in ended:
            self._poll.unregister(descriptor)
            os.close(descriptor)
        self._threads -= ended
        return bool(ended) and is_dying(self._main)

    def _is_stuck(self) -> bool:
        """Whether the main process has been dying for long, and has not ended."""
        now = self._clock.now()
        self._dying_since = min(self._dying_since, now) if is_dying(self._main) else math.inf
        return now - self._dying_since >= _STUCK_S

    def _replace_iteration_store(self, dying: int | None) -> None:
        """Takes over the port of the iteration's store, which ended with the main process, until
        all ranks have left the iteration. Ranks that are just connecting to it retry forever, in
        C++, where no interrupt reaches them; so a server must answer there. `dying` is the pidfd of
        a main process of which one thread has ended: the port becomes free when all have.
        """
        port, deadline = self._page.store_port, self._clock.now() + self._plan.durations.barrier
        if not port or not self._store.available:
            return
        if dying is not None:
            readable(dying, timeout=self._plan.durations.barrier)
        try:
            server = TCPStore.serve(host_name=self._plan.address, port=port)
        except (StoreError, RuntimeError) as e:
            write_line(e)
            return
        self._stay_until(decision_key(self._page.iteration + 1, 0), deadline)
        del server

    def _stay_until(self, key: str, deadline: float) -> None:
        """Keeps a store reachable for the other ranks until a key appears, or all members are lost:
        heartbeats continue, so that it does not wait for members whose hosts have died.
        """
        while not self._store.appeared(key, self._plan.durations.monitor_interval):
            if not self._store.available or self._clock.now() >= deadline:
                return
            current = self._store.perform(self._store.membership.current())
            if current is not None:
                self._page.iteration = current
                if self._page.member < 0:
                    self._page.member = _OBSERVER
            self._ring.beat()
            if self._ring.watched is None and self._all_lost():
                return

    def _all_lost(self) -> bool:
        view = self._store.view(self._page.iteration)
        lost = self._store.lost_members()
        return view is not None and lost is not None and view.expected <= lost


def _sink(plan: MonitorPlan) -> Sink:
    if plan.events_dir:
        try:
            return JsonlSink(Path(plan.events_dir) / f"monitor-{os.getpid()}.jsonl")
        except OSError as e:
            write_line(e)  # the main process, which has the same directory, raises it
    return NullSink()
