"""A rank's own faults: as records for the store, and as events. Includes its hang report."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from typing import Any

from outlast.coordination.decision import Decision
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.records import StopRecord
from outlast.coordination.repeated_faults import signature_of
from outlast.coordination.training_step import loop
from outlast.errors import NO_RESTART, RankShouldRestart, RestartAbort, StoreError
from outlast.events.emitter import Emitter
from outlast.events.fault_record import FaultRecord
from outlast.events.types import Decided
from outlast.inprocess.attribution import Interruption
from outlast.inprocess.interruption import flight_recorder
from outlast.inprocess.interruption.error_kinds import (
    advice,
    is_consequence,
    is_interrupt,
    is_mistake,
    overtaken,
    permanence,
)
from outlast.inprocess.interruption.monitor_thread import StackSample
from outlast.inprocess.interruption.release import QuietTorchLog
from outlast.inprocess.monitor.shared_page import Activity
from outlast.inprocess.recovery.host_protocol import Interrupted, Raised, Returned
from outlast.inprocess.recovery.launcher_notice import LauncherNotice
from outlast.inprocess.running_call import RunningCall
from outlast.inprocess.timeouts import Durations
from outlast.system.error_text import chain, first_line, release_frames, signal_name
from outlast.system.frames import user_place, user_traceback
from outlast.system.notices import notice

log = logging.getLogger("outlast.inprocess")

_TRACEBACK_CHARS = 8_000  # it goes through the store, to every rank


class RankFaults:
    """The part of `RankHost` about faults: makes this rank's records."""

    notice: LauncherNotice  # set by the session

    def __init__(self, running: RunningCall, emitter: Emitter, durations: Durations) -> None:
        self.running, self.page = running, running.page
        self.emitter, self.place = emitter, emitter.place
        self.sample: StackSample | None = None  # when the last iteration ended
        self.pings = 0  # in the function, in this iteration
        self.durations = durations
        # Half of the shortest timeout that any rank can have: how long a hung one made no progress.
        self.least_hang = min(durations.least_soft, durations.ping) / 2
        self.reported_cause = False  # this rank has shown the user why the job ends
        self.torch_log = QuietTorchLog()  # silent while connections are expected to fail
        self._shown = ""
        self._leaving: FaultRecord | None = None
        self.error: BaseException | None = None  # that the function, or initialize, raised
        self._overtaken: FaultRecord | None = None
        self.ran = 0.0  # of a fault after the function

    def fault(self, cause: str) -> FaultRecord:
        return self._noted(self._fault(self.place.iteration, Interruption.EXCEPTION, cause))

    def _fault(self, iteration: int, interruption: Interruption, cause: str) -> FaultRecord:
        own = self.place.rank, self.emitter.host, os.getpid()
        fault = self.page.fault(*own, interruption, cause)
        if self.page.activity != Activity.FUNCTION:
            fault = dataclasses.replace(fault, ran=self.ran)
        return dataclasses.replace(fault, iteration=iteration)

    def fault_of(self, error: BaseException) -> FaultRecord:
        kind = Interruption.BASE_EXCEPTION
        return self._noted(self._record_of(self.place.iteration, kind, "", error))

    def own_fault(self, error: BaseException, where: str = "") -> FaultRecord:
        iteration, kind = self.running.state.iteration, Interruption.EXCEPTION
        return self._noted(self._record_of(iteration, kind, where, error))

    def overtaken_fault(
        self, interrupt: BaseException, handled: BaseException | None
    ) -> FaultRecord | None:
        """The fault for an exception that `interrupt` has overtaken, if there is one."""
        error = overtaken(interrupt, handled)
        if error is None:
            return None
        record = self._record_of(self.running.state.iteration, Interruption.EXCEPTION, "", error)
        told = self._leaving
        if told and (told.iteration, told.cause) == (record.iteration, record.cause):
            return None
        record = dataclasses.replace(record, overtaken=True, permanent="", mistake=False)
        self._overtaken = record
        return self._noted(record)

    def leaving_fault(self, error: BaseException) -> FaultRecord:
        """The fault for an exception that will leave the function, which still waits for others."""
        self._leaving = self.own_fault(error)
        return self._leaving

    def note_kept(self, kept: list[tuple[int, Exception]]) -> None:
        """Records what signal handlers raised in our code; between two runs, without a restart."""
        while kept:
            number, error = kept.pop(0)
            record = self.own_fault(error, f"handler of {signal_name(number)}: ")
            log.warning(
                "rank %d: the handler of %s raised an exception; the call goes on\n%s",
                record.rank,
                signal_name(number),
                record.traceback.rstrip(),
            )

    def leaves_with(self, error: BaseException) -> None:
        # Both now, because the store may end as soon as the others know.
        self.torch_log.begin()
        if isinstance(error, RestartAbort):
            with contextlib.suppress(StoreError):  # the store is lost
                self.notice.aborted(reports=self.reported_cause)

    def note_decision(self, decision: Decision) -> None:
        """Writes the decision to the event log, if this is one of the ranks that do."""
        if self.emitter.drops or self.place.member not in decision.witnesses:
            return
        view, cause = decision.view, decision.cause
        self.emitter.emit(
            Decided(
                iteration=view.iteration - 1,
                cause=None if cause is None else cause.event(),
                lost=[(m, rank) for rank, m in enumerate(view.base) if m in view.lost],
                joined=[joiner.member for joiner in view.joiners],
                size=len(view.base),
                members=len(view.expected),
                ends=decision.ends_job,
                reached=decision.reached.value,
            )
        )

    def show(self, decision: Decision, reports: bool) -> None:
        if decision.view.saves:
            log.info(
                "iteration %d: the job ends once its state is saved", self.running.state.iteration
            )
        elif decision.history.cause is not None:
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
                f"{trace}\n" if trace else "",
                cause.rank,
                cause.host,
                "" if told else f"{cause.cause}{_place(cause)}\n",
                why,
                NO_RESTART,
            )

    def _show_restart(self, cause: FaultRecord | None, reports: bool) -> None:
        """With the traceback of this rank's own fault, unless an equal one was just shown."""
        if cause is None:
            log.info(
                "restart of iteration %d: the job changes its size", self.running.state.iteration
            )
            return
        own = reports and cause.member == self.place.member and bool(cause.traceback)
        again = own and signature_of(cause) == self._shown
        trace = f"\n{cause.traceback.rstrip()}" if own and not again else ""
        if own:
            self._shown = signature_of(cause)
        notice(
            log,
            "restart of iteration %d: rank %d on %s: %s%s%s%s",
            cause.iteration,
            cause.rank,
            cause.host,
            "again " if again else "",
            cause.cause,
            _place(cause),
            trace,
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

    async def hang_report(self, membership: MembershipProtocol) -> FaultRecord | None:
        """This rank's hang report, if it made no progress before a soft timeout; else `None`."""
        sample, hung, iteration = self.sample, Interruption.SOFT_TIMEOUT, self.place.iteration
        own = self.page.reported_soft == iteration
        if sample is None:
            return None
        woken = loop.wait.seconds >= self.least_hang and loop.wait.is_recent(sample.until_ns)
        if not (own or woken or sample.unpinged >= self.least_hang):
            return None
        faults = await membership.faults(iteration)
        reported = [f.idle for f in faults if f.interruption == hung.value and not f.own_report]
        if not reported:
            return None
        idle, duration = sample.idle, "until the soft timeout"
        # A program may swallow the error of a wait that the abort of another rank has ended, and go
        # on, before this rank is sampled. One that has hung since its last wait does not go on; the
        # pause is the idle time where `sample_of_error` says so.
        woken = woken and (idle < min(reported) / 2 or idle == sample.pause)
        made, passes, at = loop.wait.place if woken else sample.loop
        if not own:
            # This rank's soft timeout had not expired. The timed-out ranks wait for a rank that has
            # hung about as long as they have waited: a rank that has been idle for less than half
            # of that time is making progress. Under a limit between pings, only pings are progress.
            if self.page.soft_limit or min(reported) >= self.durations.ping:
                idle = sample.unpinged
            idle = max(idle, loop.wait.seconds) if woken else idle
            if (sample.declared and not woken) or idle < min(reported) / 2:
                return None
            duration = f"for {idle:.3f} s, when another rank's soft timeout ended the iteration"
        cause = f"no progress {duration}; it was at {sample.where or 'an unknown place'}"
        record = dataclasses.replace(
            self._fault(iteration, hung, cause),
            consequence=sample.waits_for_others or woken,
            pings=sample.pings,
            collectives=sample.collectives,
            groups=flight_recorder.begun(
                sample.groups, sample.since_ns, sample.until_ns, sample.line
            ),
            idle=idle,
            own_report=True,
            made=made,
            passes=passes,
            loop_at=at,
        )
        over = self._overtaken
        if over is not None and over.iteration == iteration:  # the others wait for what it handles
            cause = f"{over.cause}; while it was handled, {cause}"
            record = dataclasses.replace(record, cause=cause, consequence=False)
            record = dataclasses.replace(record, traceback=over.traceback, where=over.where)
        return self._noted(record)

    def classify(
        self, value: Any, error: BaseException | None, handled: BaseException | None, ending: bool
    ) -> Returned | Raised | Interrupted:
        if error is None:
            return Returned(value)
        # The abort has ended the connections to the iteration's store, too.
        lost_store = any(isinstance(each, StoreError) for each in chain(error))
        of_restart = ending and (lost_store or is_interrupt(error))
        # An abort of others is known before their restart; but a process may end because of it.
        may_be = ending or isinstance(error, Exception)
        if of_restart or (may_be and is_consequence(error)):
            fault = self.overtaken_fault(error, handled)
            if ending or fault is not None:
                release_frames(error)
                return Interrupted() if fault is None else Raised(fault)
        if isinstance(error, Exception | RankShouldRestart):
            self.error = error
            return Raised(self.own_fault(error))
        raise error

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
        if not self.emitter.drops:
            self.emitter.emit(record.event())
        return record


def _place(cause: FaultRecord) -> str:
    return f", at {cause.where}" if cause.where else ""
