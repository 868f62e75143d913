"""How a job ends on one rank: it is told to stop, it is complete, or it has failed."""

from __future__ import annotations

import contextlib
from typing import NoReturn

from outlast.async_checkpoint import Checkpointer
from outlast.elastic.job.last_save import LastSave, NotSaved
from outlast.elastic.job.live.choice import NOT_THE_SAME_STEPS
from outlast.elastic.job.restoring import Restoring
from outlast.elastic.silent_faults.job_checks import JobChecks
from outlast.elastic.stop_signals import StopSignals
from outlast.errors import CheckpointError, RestartAbort, UnevenRanks
from outlast.inprocess.running_call import RunningCall, long_phase


class Ending:
    """The end of one job. In a wrapped `call`, a fault is followed by a restart: signals are still
    requests then, and the state of the last step is kept. `released`: whether the job has ended
    without a fault that is followed by a restart.
    """

    def __init__(
        self,
        call: RunningCall | None,
        checkpointer: Checkpointer,
        checks: JobChecks,
        last_save: LastSave,
        restoring: Restoring,
        stop: StopSignals,
    ) -> None:
        self._call, self._checkpointer, self._checks = call, checkpointer, checks
        self._last_save, self._restoring, self._stop = last_save, restoring, stop
        self._timeout_s = checkpointer.kept.timeout_s or None
        self.released = False

    def save_for_stop(self) -> None:
        """The last save of a job that was told to stop: as `complete`, within the grace time."""
        self._checks.compare_now(self._stop.grace_s)
        try:
            self._last_save.complete_stop(self._stop.grace_s)
        except NotSaved as e:
            self._not_saved(e)

    def complete(self, steps: int) -> None:
        """The program has left the `with` block without an error: saves its state. Until this is
        done, nothing is released: after a fault, a restart in place continues with this state.

        Raises a `RestartAbort` in a wrapped call, and else a `CheckpointError`, if it cannot be
        saved; an `UnevenRanks` if the ranks have not made the same steps.
        """
        try:
            self._last_save.compare_steps()
            with long_phase(self._timeout_s):
                if steps:
                    self._checks.compare_now(self._stop.grace_s)
                self._checks.close()
        except Exception as e:
            self.fail(type(e))  # what the checks raise ends the job as an error of the program
            raise
        try:
            if steps:
                self._last_save.complete()
        except NotSaved as e:
            self._not_saved(e)
        with long_phase(self._timeout_s):
            self._checkpointer.close()
        self._release()

    def fail(self, kind: type[BaseException]) -> None:
        """The program has left the `with` block with an error."""
        if issubclass(kind, UnevenRanks):
            self._restoring.close(NOT_THE_SAME_STEPS)
        with long_phase(self._timeout_s):
            self._checks.close()
            if self._checkpointer.world_size == 1 and self._call and issubclass(kind, Exception):
                # No other rank can hold up the saves in progress; what is kept in memory stays, as
                # with several ranks: the next iteration continues from it.
                with contextlib.suppress(CheckpointError):  # it is in the log
                    self._checkpointer.wait(self._stop.grace_s)
                self._checkpointer.abort()
            else:
                self._checkpointer.__exit__(kind)

    def leave(self) -> None:
        """The last call at the end of the `with` block."""
        if self._call is None:
            self._release()

    def close(self) -> None:
        """Ends a job without a last save; a `CheckpointError` if a save failed."""
        self._checks.close()
        self._release()
        with long_phase(self._timeout_s):
            self._checkpointer.close()

    def _not_saved(self, error: NotSaved) -> NoReturn:
        self._checkpointer.__exit__(NotSaved)
        self._release()
        if self._call is None:
            raise error
        raise RestartAbort(str(error)) from error

    def _release(self) -> None:
        self.released = True
        self._restoring.close()
        self._stop.close()
