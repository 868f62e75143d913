"""A rank's own faults: as records for the store, and as events. Includes its hang report."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os

from outlast.coordination.decision import Decision
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.records import FaultRecord, StopRecord
from outlast.coordination.repeated_faults import signature_of
from outlast.errors import NO_RESTART, RestartAbort, StoreError
from outlast.events.emitter import Emitter
from outlast.inprocess.attribution import Interruption
from outlast.inprocess.interruption import flight_recorder
from outlast.inprocess.interruption.error_kinds import (
    advice,
    is_consequence,
    is_mistake,
    overtaken,
    permanence,
)
from outlast.inprocess.interruption.monitor_thread import StackSample
from outlast.inprocess.interruption.release import QuietTorchLog
from outlast.inprocess.monitor.reports import fault_event
from outlast.inprocess.recovery.launcher_notice import LauncherNotice
from outlast.inprocess.running_call import RunningCall
from outlast.inprocess.timeouts import Timeouts
from outlast.system.arguments import seconds
from outlast.system.error_text import first_line
from outlast.system.notices import notice
from outlast.system.user_frames import user_place, user_traceback

log = logging.getLogger("outlast.inprocess")

_TRACEBACK_CHARS = 8_000  # it goes through the store, to every rank


class RankFaults:
    """Makes the fault records of this rank: the part of `RankHost` that is about faults. `state` is
    that of the current iteration.
    """

    notice: LauncherNotice  # set by the session

    def __init__(self, running: RunningCall, emitter: Emitter, timeouts: Timeouts) -> None:
        self.running, self.page, self.emitter = running, running.page, emitter
        self.state = running.state
        self.sample: StackSample | None = None  # when the last iteration ended
        self.pings = 0  # in the function, in this iteration
        self._ping_timeout = seconds(timeouts.ping_timeout)
        # Half of the shortest timeout that any rank can have: how long a hung one made no progress.
        self._least_hang = min(seconds(timeouts.least_soft), self._ping_timeout) / 2
        self.reported_cause = False  # this rank has shown the user why the job ends
        self.torch_log = QuietTorchLog()  # silent while connections are expected to fail
        self._shown = ""

    def fault(self, iteration: int, cause: str) -> FaultRecord:
        return self._noted(self._fault(iteration, Interruption.EXCEPTION, cause))

    def _fault(self, iteration: int, interruption: Interruption, cause: str) -> FaultRecord:
        return FaultRecord(
            iteration=iteration,
            member=self.page.member,
            rank=self.state.rank,
            host=self.emitter.host,
            pid=os.getpid(),
            interruption=interruption.value,
            cause=cause,
            pings=self.page.pings,
            step=self.page.step,
        )

    def fault_of(self, iteration: int, error: BaseException) -> FaultRecord:
        return self._of_error(iteration, Interruption.BASE_EXCEPTION, "", error)

    def own_fault(self, error: BaseException, where: str = "") -> FaultRecord:
        return self._of_error(self.state.iteration, Interruption.EXCEPTION, where, error)

    def overtaken_fault(
        self, interrupt: BaseException, handled: BaseException | None
    ) -> FaultRecord | None:
        """The fault for an exception that `interrupt` has overtaken, if there is one."""
        error = overtaken(interrupt, handled)
        if error is None:
            return None
        record = self._record_of(self.state.iteration, Interruption.EXCEPTION, "", error)
        record = dataclasses.replace(record, overtaken=True, permanent="", mistake=False)
        return self._noted(record)

    def leaves_with(self, error: BaseException) -> None:
        # Both now, because the store may end as soon as the others know.
        self.torch_log.begin()
        if isinstance(error, RestartAbort):
            with contextlib.suppress(StoreError):  # the store is lost
                self.notice.aborted(reports=self.reported_cause)

    def show(self, decision: Decision, reports: bool) -> None:
        if decision.history.cause is not None:
            self._show_end(decision.history.cause, decision.history.stop, reports)
        elif decision.ended_by is None and decision.view.stop is not None and decision.ends:
            self._show_stop(decision.view.stop, decision.last_cause, reports)
        elif not decision.ends:
            self._show_restart(decision.cause, reports)

    def _show_end(self, cause: FaultRecord, why: str, reports: bool) -> None:
        self.reported_cause = reports
        if reports:
            trace = "" if signature_of(cause) == self._shown else cause.traceback.rstrip()
            told = trace.endswith(cause.cause)
            log.error(
                "%srank %d on %s: %sthe job ends after %s, exit code %d",
                *(f"{trace}\n" if trace else "", cause.rank, cause.host),
                *("" if told else f"{cause.cause}{_place(cause)}\n", why, NO_RESTART),
            )

    def _show_restart(self, cause: FaultRecord | None, reports: bool) -> None:
        """With the traceback of this rank's own fault, unless it has just shown that of an equal
        one.
        """
        if cause is None:
            log.info("restart of iteration %d: the job changes its size", self.state.iteration)
            return
        own = reports and cause.member == self.page.member and bool(cause.traceback)
        again = own and signature_of(cause) == self._shown
        trace = f"\n{cause.traceback.rstrip()}" if own and not again else ""
        if own:
            self._shown = signature_of(cause)
        notice(
            log,
            "restart of iteration %d: rank %d on %s: %s%s%s%s",
            *(cause.iteration, cause.rank, cause.host, "again " if again else ""),
            *(cause.cause, _place(cause), trace),
            shown=reports,
        )

    def _show_stop(self, stop: StopRecord, cause: FaultRecord | None, reports: bool) -> None:
        if stop.done:
            text = "the job was told to stop (%s): %s"
            notice(log, text, stop.reason, stop.done, shown=reports)
            return
        fault = "" if cause is None else f": rank {cause.rank} on {cause.host}: {cause.cause}"
        log.log(
            logging.WARNING if reports else logging.INFO,
            "the job was told to stop (%s); a fault prevented the last save%s; the steps since the "
            "newest committed checkpoint are lost",
            stop.reason,
            fault,
        )

    async def hang_report(
        self, membership: MembershipProtocol, iteration: int
    ) -> FaultRecord | None:
        """This rank's hang report, if the rank made no progress when a soft timeout ended the
        iteration: its position and its progress. The faults are read only if it may have hung.
        """
        sample, hung = self.sample, Interruption.SOFT_TIMEOUT
        own = self.page.reported_soft == iteration
        if sample is None or not (own or sample.unpinged >= self._least_hang):
            return None
        faults = await membership.faults(iteration)
        reported = [f.idle for f in faults if f.interruption == hung.value and not f.own_report]
        if not reported:
            return None
        idle, duration = sample.idle, "until the soft timeout"
        if not own:
            # This rank's soft timeout had not expired. The timed-out ranks wait for a rank that has
            # hung about as long as they have waited: a rank that has been idle for less than half
            # of that time is making progress. Under a limit between pings, only pings are progress.
            if self.page.soft_limit or min(reported) >= self._ping_timeout:
                idle = sample.unpinged
            if sample.declared or idle < min(reported) / 2:
                return None
            duration = f"for {idle:.3f} s, when another rank's soft timeout ended the iteration"
        cause = f"no progress {duration}; it was at {sample.where or 'an unknown place'}"
        record = dataclasses.replace(
            self._fault(iteration, hung, cause),
            consequence=sample.waits_for_others,
            pings=sample.pings,
            collectives=sample.collectives,
            groups=flight_recorder.begun(
                sample.groups, sample.since_ns, sample.until_ns, sample.line
            ),
            idle=idle,
            own_report=True,
        )
        return self._noted(record)

    def _of_error(
        self, iteration: int, interruption: Interruption, where: str, error: BaseException
    ) -> FaultRecord:
        return self._noted(self._record_of(iteration, interruption, where, error))

    def _record_of(
        self, iteration: int, interruption: Interruption, where: str, error: BaseException
    ) -> FaultRecord:
        cause = f"{where}{first_line(error, with_type=True)}{advice(error)}"
        return dataclasses.replace(
            self._fault(iteration, interruption, cause),
            traceback=user_traceback(error, _TRACEBACK_CHARS),
            consequence=is_consequence(error),
            where=user_place(error),
            permanent=permanence(error),
            mistake=is_mistake(error),
        )

    def _noted(self, record: FaultRecord) -> FaultRecord:
        log.debug("rank %d: recording a fault: %s", record.rank, record.cause)
        self.emitter.emit(fault_event(record))
        return record


def _place(cause: FaultRecord) -> str:
    return f", at {cause.where}" if cause.where else ""
