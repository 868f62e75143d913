"""What the monitor process does, once it is up: watch, beat, report, and serve to the end."""

from __future__ import annotations

import dataclasses
import math
import os
import select
import signal
import socket
import threading
from pathlib import Path
from typing import Any

from outlast.clock import MonotonicClock
from outlast.coordination.barrier import done_key, lost_members
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link, drive, perform_on
from outlast.coordination.records import FaultRecord, LostRecord
from outlast.errors import StoreError, TimeoutError
from outlast.events import Emitter, Fault, JsonlSink, Lost, NullSink, Sink
from outlast.events.hang_report import HUNG
from outlast.inprocess.distributed.connection import Connection, connect
from outlast.inprocess.monitor.plan import MonitorPlan
from outlast.inprocess.progress.shared_page import Activity
from outlast.inprocess.store import TCPStore
from outlast.system.processes import is_dying, open_parent, open_thread, send_signal
from outlast.system.waiting import readable

__all__ = ["MonitorLoop"]


# The hard timeout under an adaptive soft timeout: so many soft limits, and at least so long.
_ENDED_AT = 10.0
_ENDED_AFTER_S = 5.0


class MonitorLoop:
    """Runs in the monitor process.

    Args:
        plan: what to do.
        main: process id of the main process.
        end: the socket to it.
        server: kept alive: it serves while it lives.
    """

    def __init__(self, plan: MonitorPlan, main: int, end: socket.socket, server: Any) -> None:
        self.plan, self.page, self.main, self.end = plan, plan.page, main, end
        self.server = server
        self.clock = MonotonicClock()
        sink: Sink = NullSink()
        if plan.events_dir:
            try:
                sink = JsonlSink(Path(plan.events_dir) / f"monitor-{os.getpid()}.jsonl")
            except OSError as e:
                print(e)  # the main process, which has the same directory, raises it
        self.emitter = Emitter(sink)
        self.poll = select.poll()
        self.pidfd = self._open_pidfd()
        self.poll.register(end, select.POLLIN)
        self.threads: set[int] = set()
        self.link = Link(plan.prefix)
        self.membership = MembershipProtocol(self.link, plan.world_size)
        self.store: Connection | None = None
        self.main_alive = self.pidfd is not None
        self.kill_at: float | None = None
        self.next_beat = 0.0
        self.sibling: int | None = None
        self.sibling_iteration = -2
        self.sibling_count, self.sibling_seen = -1, 0.0

    def run(self) -> None:
        """Until there is nothing left to do."""
        self._connect()
        dismissed = False
        while self.main_alive and not dismissed:
            ready = [fd for fd, _ in self.poll.poll(self._pause() * 1000)]
            if self.pidfd in ready or self._threads_ended(ready):
                self.main_alive = False
            elif self.end.fileno() in ready:
                word = self.end.recv(1)
                dismissed = word == b"B"
                if word == b"T":
                    self._watch_threads()
                elif not word:
                    # Without a word: the main process ends, and its descriptors are closed
                    # before its pidfd tells so.
                    self.poll.unregister(self.end)
            else:
                self._check_progress()
                self._beat()
        if not self.main_alive and self.page.activity != Activity.DONE:
            self._report_death()
        elif dismissed and self.page.member < 0:
            self._report_departure()
        self._stand_in()
        if self.server is not None and self.store is not None:
            self._serve_to_the_end()

    # -- coming up ---------------------------------------------------------------------------

    def _open_pidfd(self) -> int | None:
        pidfd = open_parent(self.main)
        if pidfd is not None:
            self.poll.register(pidfd, select.POLLIN)
        return pidfd

    def _watch_threads(self) -> None:
        for tid in (self.page.thread_1, self.page.thread_2):
            descriptor = open_thread(tid) if tid else None
            if descriptor is not None:
                self.threads.add(descriptor)
                self.poll.register(descriptor, select.POLLIN)

    def _threads_ended(self, ready: list[int]) -> bool:
        """Whether a thread has ended because the main process is dying."""
        ended = self.threads.intersection(ready)
        for descriptor in ended:
            self.poll.unregister(descriptor)
            os.close(descriptor)
        self.threads -= ended
        return bool(ended) and is_dying(self.main)

    def _connect(self) -> None:
        """Reaches the store; gives up when the main process has ended, or needs it no longer."""
        deadline = self.clock.now() + self.plan.patience
        while self.store is None and self.clock.now() < deadline:
            try:
                plan = self.plan
                self.store = connect(plan.factory, plan.kwargs, plan.endpoint, 1.0, plan.ready)
            except (StoreError, TimeoutError) as e:
                print(e)
                if self.pidfd is None or self.poll.poll(0):
                    return

    # -- while the main process lives --------------------------------------------------------

    def _pause(self) -> float:
        """Seconds until something is due, if no event comes before."""
        now = self.clock.now()
        due = self.next_beat
        if self.kill_at is not None:
            due = min(due, self.kill_at)
        elif self.page.activity in (Activity.FUNCTION, Activity.USER, Activity.LEAVING):
            soft, hard = self._limits()
            pending = hard if self.page.reported_soft == self.page.iteration else soft
            due = min(due, self.page.progress + pending)
        return max(0.001, min(due - now, self.plan.interval))

    def _limits(self) -> tuple[float, float]:
        """Seconds without progress until the soft and the hard timeout, in this activity."""
        plan, page = self.plan, self.page
        if page.activity != Activity.FUNCTION:
            return plan.hard, plan.hard
        if page.long_limit:
            soft = page.long_limit if page.long_limit > 0 else plan.soft
            return soft, max(plan.hard, soft + plan.hard - plan.soft)
        if not page.soft_limit:
            return plan.soft, plan.hard
        # With a learned limit the hard timeout follows: a rank that holds the GIL can only be
        # ended. But ending a process costs more than an interrupt: it gets much longer.
        soft = page.soft_limit
        return soft, min(plan.hard, max(_ENDED_AT * soft, _ENDED_AFTER_S))

    def _check_progress(self) -> None:
        page = self.page
        if self.kill_at is not None:
            if self.clock.now() >= self.kill_at:
                self.kill_at = math.inf
                self._signal(signal.SIGKILL)
            return
        if page.activity not in (Activity.FUNCTION, Activity.USER, Activity.LEAVING):
            return
        iteration = page.iteration
        now = self.clock.now()
        idle = now - page.progress
        soft, hard = self._limits()
        if idle >= hard:
            self._terminate(idle, now)
        elif (
            page.activity == Activity.FUNCTION
            and idle >= soft
            and self.page.reported_soft != iteration
        ):
            cause = f"no progress for {idle:.3f} s (soft timeout {soft:.3f} s)"
            fault = dataclasses.replace(self._fault(HUNG, cause), idle=idle)
            page.reported_soft = iteration  # before anyone can know that the iteration ends
            self._emit_fault(fault)
            self._drive(self.membership.report_fault(fault))

    def _terminate(self, idle: float, now: float) -> None:
        """The hard timeout. The end is reported by `_report_death`, when it is a fact. Until then
        the loop goes on: a process that ends in order, on SIGTERM, says so.
        """
        self.page.killed_hard = 1
        self.hard_cause = f"no progress for {idle:.3f} s (hard timeout): ended by its monitor"
        self.kill_at = now + self.plan.grace
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        assert self.pidfd is not None
        send_signal(self.pidfd, number)

    def _beat(self) -> None:
        now = self.clock.now()
        if now < self.next_beat or self.store is None or self.page.member < 0:
            return
        self.next_beat = now + self.plan.interval
        try:
            self.store.add(f"{self.plan.prefix}beat/{self.page.member}", 1)
            self._watch_sibling()
        except StoreError as e:
            print(e)
            self.store = None  # the main process sees it too; what is left is to watch it

    def _watch_sibling(self) -> None:
        """The next member in the ring must be heard of. Judged by this clock alone: by when this
        process last saw the count change.
        """
        iteration = self.page.iteration
        if iteration != self.sibling_iteration:
            self._choose_sibling(iteration, frozenset())
        if self.sibling is None or self.store is None:
            return
        count = self.store.add(f"{self.plan.prefix}beat/{self.sibling}", 0)
        now = self.clock.now()
        if count != self.sibling_count:
            self.sibling_count, self.sibling_seen = count, now
        elif now - self.sibling_seen >= self.plan.heartbeat:
            lost = self._drive(lost_members(self.link)) or frozenset()
            if self.sibling not in lost:
                self._report_unresponsive(self.sibling)
            self._choose_sibling(iteration, lost | {self.sibling})

    def _choose_sibling(self, iteration: int, lost: frozenset[int]) -> None:
        view = self._drive(self.membership.view(iteration))
        self.sibling = None
        self.sibling_iteration = iteration
        self.sibling_count, self.sibling_seen = -1, self.clock.now()
        if view is None:
            return
        me = self.page.member
        ring = sorted(m for m in view.expected if m != me and m not in lost)
        if ring:
            self.sibling = next((m for m in ring if m > me), ring[0])

    # -- reports -----------------------------------------------------------------------------

    hard_cause = ""

    def _report_death(self) -> None:
        hard = bool(self.page.killed_hard)
        cause = (
            self.hard_cause
            if hard
            else (f"process {self.main} ended without a word (killed, or crashed)")
        )
        fault = self._fault("HARD_TIMEOUT" if hard else "TERMINATED", cause)
        self._emit_fault(fault)
        self.emitter.emit(
            Lost(iteration=fault.iteration, member=fault.member, rank=fault.rank, reason=cause)
        )
        plan = self.plan
        self._drive(self.membership.report_killed(plan.rank, plan.token, fault.member, fault))

    def _report_departure(self) -> None:
        """The main process failed before it had a place; it lives, but nobody need wait for it."""
        plan, cause = self.plan, f"process {self.main} failed before it took its place"
        fault = self._fault("BASE_EXCEPTION", cause)
        self._emit_fault(fault)
        self._drive(self.membership.report_killed(plan.rank, plan.token, -1, fault))

    def _report_unresponsive(self, member: int) -> None:
        iteration = self.page.iteration
        view = self._drive(self.membership.view(iteration))
        slots = () if view is None else view.slots()
        rank = slots.index(member) if member in slots else -1
        cause = f"not heard of for {self.plan.heartbeat:.3f} s (heartbeat timeout)"
        fault = FaultRecord(
            iteration, member, rank, "(its host does not answer)", -1, "UNRESPONSIVE", cause
        )
        self._emit_fault(fault)
        self.emitter.emit(Lost(iteration=iteration, member=member, rank=rank, reason=cause))
        self._drive(self.membership.report_lost(LostRecord(member, cause), iteration, fault))

    def _fault(self, interruption: str, cause: str) -> FaultRecord:
        page = self.page
        return FaultRecord(
            iteration=max(page.iteration, 0),
            member=page.member,
            rank=page.rank if page.rank >= 0 else self.plan.rank,
            host=self.emitter.host,
            pid=self.main,
            interruption=interruption,
            cause=cause,
            pings=page.pings,
        )

    def _emit_fault(self, fault: FaultRecord) -> None:
        self.emitter.emit(
            Fault(
                iteration=fault.iteration,
                member=fault.member,
                rank=fault.rank,
                host=fault.host,
                interruption=fault.interruption,
                cause=fault.cause,
                pings=fault.pings,
            )
        )

    def _drive(self, coroutine: Any) -> Any:
        if self.store is None:
            coroutine.close()
            return None
        try:
            return drive(coroutine, perform_on(self.store))
        except StoreError as e:
            print(e)
            self.store = None
            return None

    # -- last duties -------------------------------------------------------------------------

    def _stand_in(self) -> None:
        """For the store of the iteration, which has gone with the main process. Ranks that are just
        connecting to it try again and again, in C++, where no interrupt gets them out; so somebody
        must answer there until all have left the function.
        """
        port, deadline = self.page.store_port, self.clock.now() + self.plan.patience
        if not port or self.store is None or self.pidfd is None:
            return
        if not self.main_alive:  # told by a thread, perhaps: the port is free when all is over
            readable(self.pidfd, timeout=self.plan.patience)
        try:
            server = TCPStore.serve(host_name=self.plan.address, port=port)
        except (StoreError, RuntimeError) as e:
            print(e)
            return
        self._stay(done_key(f"term/{self.page.iteration}"), deadline)
        del server

    def _serve_to_the_end(self) -> None:
        """Until every member has said goodbye."""
        self._stay(done_key("goodbye"), math.inf)

    def _stay(self, key: str, deadline: float) -> None:
        """Until the key appears. Meanwhile it goes on as the observer of the ring, so that members
        whose hosts died are not waited for.
        """
        over, writable = os.pipe()
        thread = threading.Thread(target=self._await, args=(key, writable), daemon=True)
        thread.start()
        while not readable(over, timeout=self.plan.interval) and self.clock.now() < deadline:
            if self.store is None:
                return
            current = self._drive(self.membership.current())
            if current is not None:
                self.page.iteration = current
                if self.page.member < 0:
                    self.page.member = 1 << 40  # a watcher that is no member, at the ring's end
            self._beat()
            if self.sibling is None and self._all_lost():
                return

    def _all_lost(self) -> bool:
        view = self._drive(self.membership.view(self.page.iteration))
        lost = self._drive(lost_members(self.link))
        return view is not None and lost is not None and view.expected <= lost

    def _await(self, key: str, writable: int) -> None:
        try:
            connection = connect(
                self.plan.factory, self.plan.kwargs, self.plan.endpoint, self.plan.patience
            )
            connection.wait_for(self.plan.prefix + key, None)
        except (StoreError, TimeoutError) as e:
            print(e)
        os.write(writable, b"x")
