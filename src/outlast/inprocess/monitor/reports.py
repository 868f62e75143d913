"""What a monitor process has: its plan, its log, the store, and its reports."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from outlast.coordination.barrier import lost_members
from outlast.coordination.decision import Rules, ViewRecord
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link, Op, perform_on, run
from outlast.coordination.records import LostRecord, process_name
from outlast.coordination.stores.store import KeyTimeout
from outlast.errors import RankTimeout, StoreError
from outlast.events.emitter import Emitter
from outlast.events.fault_record import FaultRecord
from outlast.events.types import Lost
from outlast.inprocess.attribution import Interruption
from outlast.inprocess.monitor.shared_page import SharedPage
from outlast.inprocess.store import Connection, StoreMixin, connect
from outlast.inprocess.timeouts import Durations

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class MonitorPlan:
    """The configuration of one monitor process, fixed before the fork."""

    page: SharedPage
    factory: type[StoreMixin]  # of the store, as the next two
    kwargs: Mapping[str, Any]
    endpoint: tuple[str, int] | None
    serve: bool  # whether this monitor serves the store
    ready: str  # the key that the store's server sets for this call, or an empty string
    prefix: str
    rank: int  # the values with which the main process registers
    world_size: int
    token: str
    durations: Durations
    logfile: str | None  # gets the output of the monitor process; `None` discards it
    events_dir: str
    address: str = ""  # of this host, on which an iteration's store is served
    host_id: str = ""  # of this host among those of the job; empty for a job on one host
    host_ring: bool = False  # whether members watch those on the same host only: hosts have leases
    rules: Rules = dataclasses.field(default_factory=Rules)


def write_line(text: object) -> None:
    """Writes one line. A full disk does not end the monitor process."""
    now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
    with contextlib.suppress(OSError):
        print(f"{now} {text}")


def write_for(pid: int, line: str) -> None:
    """Writes a line to the stderr of another process, unless that is closed, a socket, or a file
    at a position of the other process's own, where it would overwrite the line. The stream is open
    only for the line: a descriptor that stayed open would keep a pipe from ending.
    """
    try:
        flags = Path(f"/proc/{pid}/fdinfo/2").read_text().partition("flags:")[2].split()[0]
        descriptor = os.open(
            f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
        )
    except OSError as e:
        write_line(f"{line} (not shown: {e})")
        return
    with os.fdopen(descriptor, "wb", buffering=0) as stream:
        if not stream.seekable() or int(flags, 8) & os.O_APPEND:
            try:
                stream.write(f"{line}\n".encode())
            except OSError as e:
                write_line(f"{line} (not shown: {e})")


class StoreAccess:
    """A connection dropped on the first error: the monitor goes on watching without the store."""

    def __init__(self, plan: MonitorPlan) -> None:
        self._plan = plan
        self.link = Link(plan.prefix)
        self.membership = MembershipProtocol(self.link, plan.world_size, plan.rules)
        self._connection: Connection | None = None

    @property
    def available(self) -> bool:
        return self._connection is not None

    def connect(self, give_up: Callable[[], bool]) -> None:
        plan = self._plan
        place = plan.factory, plan.kwargs, plan.endpoint
        deadline = time.monotonic() + plan.durations.barrier
        while self._connection is None:
            try:
                self._connection = connect(*place, plan.durations.barrier, plan.ready, give_up)
                self.link.perform = perform_on(self._connection)
            except (StoreError, RankTimeout) as e:
                write_line(e)
                if isinstance(e, RankTimeout) or give_up() or time.monotonic() > deadline:
                    return
                time.sleep(0.1)

    def perform(self, coroutine: Coroutine[Op, Any, T]) -> T | None:
        """Runs the store operations of `coroutine`; `None` if the store is lost."""
        if self._connection is None:
            coroutine.close()
            return None
        try:
            return run(coroutine)
        except StoreError as e:
            write_line(e)
            self._connection = None
            return None

    def appeared(self, key: str, timeout: float) -> bool:
        """Waits for a key for `timeout` seconds; false if the store is lost."""
        with contextlib.suppress(KeyTimeout):
            return self.perform(self.link.wait_for(key, timeout)) is not None
        return False

    def view(self, iteration: int) -> ViewRecord | None:
        return self.perform(self.membership.view(iteration))

    def lost_members(self) -> frozenset[int] | None:
        return self.perform(lost_members(self.link))


class FaultReports:
    """Writes faults to the store and to the event log; `main` is the pid of the main process."""

    def __init__(self, plan: MonitorPlan, main: int, emitter: Emitter, store: StoreAccess) -> None:
        self._plan, self._page, self._main = plan, plan.page, main
        self._emitter, self._store, self._membership = emitter, store, store.membership
        self._hard_timeout_cause, self._idle_from = "", 0.0
        self._native_frames = ""

    def soft_timeout(self, idle: float, limit: float, what: str) -> None:
        """There was no `what` ("progress", "ping") for `idle` seconds: ends the iteration."""
        timeout = "ping timeout" if what == "ping" else "soft timeout"
        cause = f"no {what} for {idle:.3f} s ({timeout} {limit:.3f} s)"
        fault = dataclasses.replace(self._fault(Interruption.SOFT_TIMEOUT, cause), idle=idle)
        # Written before the store, where the other ranks can see the end of the iteration.
        self._page.reported_soft = fault.iteration
        self._emitter.emit(fault.event())
        self._store.perform(self._membership.report_fault(fault))

    def hard_timeout(self, idle: float, what: str) -> None:
        """The main process is terminated after `idle` seconds of `what`; see `death`."""
        cause = f"{what} for {idle:.3f} s (hard timeout): terminated by its monitor process"
        self._hard_timeout_cause, self._idle_from = cause, self._emitter.clock.now() - idle
        fault = self._fault(Interruption.HARD_TIMEOUT, cause)
        # Before its end, which the launcher sees at once.
        process = process_name(self._plan.host_id, self._main)
        why = f"{what} for {idle:.0f} s (hard timeout)"
        self._store.perform(self._membership.announce_kill(process, fault, why))
        # Without it, the launcher's line about a killed process would be all that is seen.
        write_for(
            self._main,
            f"rank {fault.rank} on {self._emitter.host}: {why}: "
            f"process {self._main} is terminated by its monitor process",
        )

    def native_frames(self, said: str) -> None:
        """What is known of those of the process that is terminated; may be empty."""
        if said:
            self._native_frames = f"the native frames of process {self._main} {said}"
            line = f"rank {self._page.rank} on {self._emitter.host}: {self._native_frames}"
            write_line(line)
            write_for(self._main, line)

    def death(self) -> None:
        idle = 0.0
        if self._page.killed_hard:
            kind, cause = Interruption.HARD_TIMEOUT, self._hard_timeout_cause
            idle = self._emitter.clock.now() - self._idle_from
        else:
            kind = Interruption.TERMINATED
            cause = f"process {self._main} ended without a report (killed or crashed)"
        fault = self._fault(kind, cause)
        fault = dataclasses.replace(fault, idle=idle, traceback=self._native_frames)
        self._emit_lost(fault)
        self._report_killed(fault.member, fault)

    def departure(self) -> None:
        """The main process failed before it had a rank. It is alive, but no member waits for it."""
        cause = f"process {self._main} failed before it took its rank"
        fault = self._fault(Interruption.BASE_EXCEPTION, cause)
        self._emitter.emit(fault.event())
        self._report_killed(-1, fault)

    def unresponsive(self, member: int) -> None:
        iteration = self._page.iteration
        view = self._store.view(iteration)
        slots = () if view is None else view.slots()
        fault = FaultRecord(
            iteration=iteration,
            member=member,
            rank=slots.index(member) if member in slots else -1,
            host="(unknown: no heartbeat)",
            pid=-1,
            interruption=Interruption.UNRESPONSIVE.value,
            cause=f"no heartbeat for {self._plan.durations.heartbeat:.3f} s (heartbeat timeout)",
            idle=self._plan.durations.heartbeat,
        )
        self._emit_lost(fault)
        lost = LostRecord(member, fault.cause)
        self._store.perform(self._membership.report_lost(lost, iteration, fault))

    def _report_killed(self, member: int, fault: FaultRecord) -> None:
        plan = self._plan
        self._store.perform(self._membership.report_killed(plan.token, plan.rank, member, fault))

    def _fault(self, kind: Interruption, cause: str) -> FaultRecord:
        rank = self._page.rank if self._page.rank >= 0 else self._plan.rank
        return self._page.fault(rank, self._emitter.host, self._main, kind, cause)

    def _emit_lost(self, fault: FaultRecord) -> None:
        self._emitter.emit(fault.event())
        k, member, rank = fault.iteration, fault.member, fault.rank
        self._emitter.emit(Lost(iteration=k, member=member, rank=rank, reason=fault.cause))
