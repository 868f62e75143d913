"""A rank's own faults: as records for the store, and as events. Includes its hang report."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Callable

from outlast.coordination.decisions.repeated_faults import signature_of
from outlast.coordination.records import FaultRecord, StopRecord
from outlast.errors import NO_RESTART, RestartAbort
from outlast.events import Emitter
from outlast.inprocess.attribution import Interruption
from outlast.inprocess.distributed.torch_log import QuietTorchLog
from outlast.inprocess.interruption.fault_echo import is_consequence, overtaken
from outlast.inprocess.interruption.permanent_error import advice, is_mistake, permanence
from outlast.inprocess.interruption.stack_sample import StackSample
from outlast.inprocess.monitor.fault_reports import fault_event
from outlast.inprocess.progress.shared_page import SharedPage
from outlast.inprocess.state import State
from outlast.system.error_text import first_line
from outlast.system.notices import notice
from outlast.system.user_frames import user_place, user_traceback

log = logging.getLogger("outlast.inprocess")

_TRACEBACK_CHARS = 8_000  # it goes through the store, to every rank


class RankFaults:
    """Makes the fault records of this rank: the part of `RankHost` that is about faults.

    Attributes:
        state: the state of this rank in the current iteration.
        sample: the function's thread when the last iteration ended.
        pings: those in the function, in this iteration.
        ping_timeout: of the settings, in seconds; `least_hang`: half of the shortest timeout.
        announce_abort: tells the launcher that the job is aborted; set by the session.
        fault_came_back: whether the last fault of the job is equal to one before it, without
            progress in between; set by the state machine.
        reported_cause: whether this rank has shown the user why the job ends.
        torch_log: silent while connections are expected to fail.
    """

    announce_abort: Callable[[], None]
    fault_came_back = False
    ping_timeout = math.inf
    least_hang = 0.0

    def __init__(self, page: SharedPage, emitter: Emitter, state: State) -> None:
        self.page, self.emitter, self.state = page, emitter, state
        self.sample: StackSample | None = None
        self.pings = 0
        self.reported_cause = False
        self.torch_log = QuietTorchLog()
        self._shown = ""

    def fault(self, iteration: int, interruption: Interruption, cause: str) -> FaultRecord:
        """A fault that has no exception; emits no event."""
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
        """The fault for an exception that ends this member."""
        return self._of_error(iteration, Interruption.BASE_EXCEPTION, "", error)

    def own_fault(self, error: BaseException, where: str = "") -> FaultRecord:
        """The fault for an exception in the function or in initialize that restarts the job."""
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

    def progress(self) -> tuple[int, int]:
        return self.page.step, self.pings

    def leaves_with(self, error: BaseException) -> None:
        # Both now, because the store may end as soon as the others know.
        self.torch_log.begin()
        if isinstance(error, RestartAbort):
            self.announce_abort()

    def unrecoverable(self, cause: FaultRecord, why: str, reports: bool) -> None:
        self.reported_cause = reports
        if reports:
            trace = "" if signature_of(cause) == self._shown else cause.traceback.rstrip()
            told = trace.endswith(cause.cause)
            log.error(
                "%srank %d on %s: %sthe job ends after %s, exit code %d",
                *(f"{trace}\n" if trace else "", cause.rank, cause.host),
                *("" if told else f"{cause.cause}{_place(cause)}\n", why, NO_RESTART),
            )

    def show_restart(self, cause: FaultRecord | None, reports: bool) -> None:
        """Logs the cause of a restart; users see it by default where this rank `reports`: with the
        traceback of its own fault, unless it has just shown that of an equal one.
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

    def stopped(self, stop: StopRecord, cause: FaultRecord | None, reports: bool) -> None:
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

    def may_have_hung(self, iteration: int) -> bool:
        """Whether this rank made no progress for as long as a hung one: half of the shortest
        timeout that any rank can have.
        """
        sample = self.sample
        if sample is None:
            return False
        return self.page.reported_soft == iteration or sample.unpinged >= self.least_hang

    def hang_report(self, iteration: int, faults: list[FaultRecord]) -> FaultRecord | None:
        """This rank's hang report, if the rank made no progress when a soft timeout ended the
        iteration: its position and its progress.
        """
        sample, hung = self.sample, Interruption.SOFT_TIMEOUT
        idle = 0.0 if sample is None else sample.idle
        reported = [f.idle for f in faults if f.interruption == hung.value and not f.own_report]
        if sample is None or not reported:
            return None
        duration = "until the soft timeout"
        if self.page.reported_soft != iteration:
            # This rank's soft timeout had not expired. The timed-out ranks wait for a rank that has
            # hung about as long as they have waited: a rank that has been idle for less than half
            # of that time is making progress. Under a limit between pings, only pings are progress.
            if self.page.soft_limit or min(reported) >= self.ping_timeout:
                idle = sample.unpinged
            if sample.declared or idle < min(reported) / 2:
                return None
            duration = f"for {idle:.3f} s, when another rank's soft timeout ended the iteration"
        cause = f"no progress {duration}; it was at {sample.where or 'an unknown place'}"
        record = dataclasses.replace(
            self.fault(iteration, hung, cause),
            consequence=sample.waits_for_others,
            pings=sample.pings,
            collectives=sample.collectives,
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
            self.fault(iteration, interruption, cause),
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
