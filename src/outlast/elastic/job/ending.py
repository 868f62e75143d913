"""How a job ends: its training is complete, it was told to stop, or a fault ends it."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterable

from outlast.async_checkpoint import Checkpointer
from outlast.coordination.call_ledger import CallLedger
from outlast.elastic.job.counters import Counters
from outlast.elastic.job.live.restore import LiveState
from outlast.elastic.job.preemption import StopAgreement
from outlast.elastic.job.saves import NotSaved, Saves
from outlast.elastic.job.stop_request import present_request, release_request
from outlast.elastic.silent_faults.job_checks import JobChecks
from outlast.errors import RestartAbort
from outlast.events import StopRequested
from outlast.inprocess.running_call import RunningCall, long_phase
from outlast.system.notices import notice

log = logging.getLogger("outlast.elastic")


class Ending:
    """The end of one job, on one rank, and the requests to stop until then.

    Args:
        ledger: used for the agreement on a last step.
        call: the wrapped call, if any.
        grace: how long the last save may take after a request to stop.
        exit_code: that of a job that was told to stop.
        live: the state that a restart in place would continue from.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        counters: Counters,
        saves: Saves,
        checks: JobChecks,
        ledger: CallLedger,
        call: RunningCall | None,
        *,
        grace: datetime.timedelta,
        exit_code: int,
        live: LiveState | None,
    ) -> None:
        self._checkpointer, self._counters, self._saves = checkpointer, counters, saves
        self._checks, self._ledger, self._call = checks, ledger, call
        self._grace, self._exit_code, self._live = grace, exit_code, live
        self._agreement: StopAgreement | None = None
        self._closed = False
        self._request = present_request()

    def install(self, signals: Iterable[int]) -> None:
        """Makes these signals requests to stop. After a restart in place, the handlers of the
        previous iteration have stayed.
        """
        self._request.install(tuple(signals), self._exit_code)

    def request(self, why: str) -> None:
        """Requests a stop. Safe to call from any thread.

        Raises:
            ValueError: if the job is closed.
        """
        if self._closed:
            raise ValueError("this job is closed")
        self._request.request(why)

    def listen(self) -> StopAgreement:
        """From now on, a request ends the job after a step on which all ranks agree."""
        if self._agreement is None:
            self._agreement = StopAgreement(self._ledger, self._counters.steps + 1)
            self._request.attach(self._agreement)
            if self._call is not None and self._call.stop is not None:  # without a restore()
                self._agreement.request(self._call.stop.reason)
        return self._agreement

    def stop_listening(self) -> None:
        """This rank begins no more steps."""
        if self._agreement is not None:
            self._request.detach(self._agreement)
            self._agreement.close()
            self._agreement = None

    def note_step(self) -> None:
        """A step is complete."""
        self._request.furthest = max(self._request.furthest, self._counters.steps)

    def stop_if_last(self) -> None:
        """Ends the process, if the step that is complete is the last one."""
        agreement = self.listen()
        if agreement.is_last(self._counters.steps, self._grace.total_seconds()):
            self.stop(agreement.reason)

    def stop_if_told_before(self) -> None:
        """Ends the process, if the job was told to stop before a restart in place."""
        if self._call is not None and self._call.stop is not None:
            self.stop(self._call.stop.reason)

    def stop(self, reason: str) -> None:
        """Saves for the last time, and ends the process."""
        steps, grace_s = self._counters.steps, self._grace.total_seconds()
        first = self._checkpointer.rank == 0
        notice(log, "stopping after step %d: %s", steps, reason, shown=first)
        self._checkpointer.emitter.emit(StopRequested(reason=reason))
        if self._call is not None:
            self._call.saving_for_stop(grace_s)
        with long_phase(2 * grace_s or None):
            self._checks.compare_now(grace_s)
            if not self._saves.is_saved():
                self._saves.save()
            self._checkpointer.wait(self._grace)
        furthest, done = self._request.furthest, f"step {steps} is saved"
        if furthest > steps:
            done += f"; the steps up to {furthest}, done before a fault, are lost"
            notice(log, done, shown=first)
        if self._call is not None:
            self._call.finish_stop(done)
        raise SystemExit(self._exit_code)

    def complete(self) -> None:
        """The program has left the `with` block without an error: saves its state. Until this is
        done, nothing is released: after a fault, a restart in place continues with this state.

        Raises:
            RestartAbort: in a wrapped call, if the state cannot be saved. A restart would train
                again from a checkpoint.
            CheckpointError: without a wrapped call, the same.
        """
        steps, timeout_s = self._counters.steps, self._checkpointer.kept.timeout_s or None
        try:
            with long_phase(timeout_s):
                if steps:
                    self._checks.compare_now(self._grace.total_seconds())
                self._checks.close()
        except Exception as e:
            self.fail(type(e))  # what the checks raise ends the job as an error of the program does
            raise
        try:
            if steps:
                self._saves.complete()
        except NotSaved as e:
            self._checkpointer.__exit__(NotSaved)
            self.close()
            if self._call is None:
                raise
            raise RestartAbort(str(e)) from e
        with long_phase(timeout_s):
            self._checkpointer.close()
        self.close()

    def fail(self, kind: type[BaseException]) -> None:
        """The program has left the `with` block with an error."""
        with long_phase(self._checkpointer.kept.timeout_s or None):
            self._checks.close()
            self._checkpointer.__exit__(kind)

    def close(self) -> None:
        """The job has ended without a fault that is followed by a restart in place."""
        self._closed = True
        if self._live is not None:
            self._live.close()
        release_request()
