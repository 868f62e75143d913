"""Reports of the monitor process: a hang, the death of its main process, a silent member."""

from __future__ import annotations

import dataclasses

from outlast.coordination.lost_host import report_killed
from outlast.coordination.records import FaultRecord, LostRecord, process_name
from outlast.events import Emitter, Fault, Lost
from outlast.inprocess.attribution import Interruption
from outlast.inprocess.monitor.config import MonitorPlan
from outlast.inprocess.monitor.logfile import write_for
from outlast.inprocess.monitor.store_access import StoreAccess


def fault_event(fault: FaultRecord) -> Fault:
    """The event equivalent to the record."""
    values = dataclasses.asdict(fault)
    for name in ("pid", "permanent", "step", "mistake"):  # an event's pid is its writer's
        del values[name]
    return Fault(**values)


class FaultReports:
    """Writes faults to the store and to the event log; `main` is the pid of the main process."""

    def __init__(self, plan: MonitorPlan, main: int, emitter: Emitter, store: StoreAccess) -> None:
        self._plan, self._page, self._main = plan, plan.page, main
        self._emitter, self._store, self._membership = emitter, store, store.membership
        self._hard_timeout_cause, self._idle_from = "", 0.0

    def soft_timeout(self, idle: float, limit: float, what: str) -> None:
        """There was no `what` ("progress", "ping") for `idle` seconds: ends the iteration."""
        timeout = "ping timeout" if what == "ping" else "soft timeout"
        cause = f"no {what} for {idle:.3f} s ({timeout} {limit:.3f} s)"
        fault = dataclasses.replace(self._fault(Interruption.SOFT_TIMEOUT, cause), idle=idle)
        # Written before the store, where the other ranks can see the end of the iteration.
        self._page.reported_soft = fault.iteration
        self._emitter.emit(fault_event(fault))
        self._store.perform(self._membership.report_fault(fault))

    def hard_timeout(self, idle: float, what: str) -> None:
        """The main process is terminated after `idle` seconds of `what`, such as "no progress"; see
        `death`.
        """
        cause = f"{what} for {idle:.3f} s (hard timeout): terminated by its monitor process"
        self._hard_timeout_cause, self._idle_from = cause, self._emitter.clock.now() - idle
        rank = self._fault(Interruption.HARD_TIMEOUT, cause).rank
        # Before its end, which the launcher sees at once.
        process = process_name(self._plan.host_id, self._main)
        why = f"{what} for {idle:.0f} s (hard timeout)"
        self._store.perform(self._membership.announce_kill(process, why))
        # Without it, the launcher's line about a killed process would be all that is seen.
        write_for(
            self._main,
            f"rank {rank} on {self._emitter.host}: {why}: "
            f"process {self._main} is terminated by its monitor process",
        )

    def death(self) -> None:
        """The main process has ended without leaving the wrapped call."""
        idle = 0.0
        if self._page.killed_hard:
            kind, cause = Interruption.HARD_TIMEOUT, self._hard_timeout_cause
            idle = self._emitter.clock.now() - self._idle_from
        else:
            kind = Interruption.TERMINATED
            cause = f"process {self._main} ended without a report (killed or crashed)"
        fault = dataclasses.replace(self._fault(kind, cause), idle=idle)
        self._emit_lost(fault)
        self._report_killed(fault.member, fault)

    def departure(self) -> None:
        """The main process failed before it had a rank. It is alive, but no member waits for it."""
        cause = f"process {self._main} failed before it took its rank"
        fault = self._fault(Interruption.BASE_EXCEPTION, cause)
        self._emitter.emit(fault_event(fault))
        self._report_killed(-1, fault)

    def unresponsive(self, member: int) -> None:
        """The heartbeat of `member` has stopped."""
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
            cause=f"no heartbeat for {self._plan.heartbeat:.3f} s (heartbeat timeout)",
            idle=self._plan.heartbeat,
        )
        self._emit_lost(fault)
        lost = LostRecord(member, fault.cause)
        self._store.perform(self._membership.report_lost(lost, iteration, fault))

    def _report_killed(self, member: int, fault: FaultRecord) -> None:
        plan = self._plan
        self._store.perform(
            report_killed(self._membership, plan.host_id, plan.rank, plan.token, member, fault)
        )

    def _fault(self, kind: Interruption, cause: str) -> FaultRecord:
        page = self._page
        return FaultRecord(
            iteration=max(page.iteration, 0),
            member=page.member,
            rank=page.rank if page.rank >= 0 else self._plan.rank,
            host=self._emitter.host,
            pid=self._main,
            interruption=kind.value,
            cause=cause,
            pings=page.pings,
            step=page.step,
        )

    def _emit_lost(self, fault: FaultRecord) -> None:
        self._emitter.emit(fault_event(fault))
        k, member, rank = fault.iteration, fault.member, fault.rank
        self._emitter.emit(Lost(iteration=k, member=member, rank=rank, reason=fault.cause))
