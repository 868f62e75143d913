"""How a job ends on one rank: it is told to stop, it is complete, or it has failed."""

from __future__ import annotations

from outlast.async_checkpoint import Checkpointer
from outlast.elastic.job.restoring import Restoring
from outlast.elastic.job.saves import NotSaved, Saves
from outlast.elastic.silent_faults.job_checks import JobChecks
from outlast.elastic.stop_signals import StopSignals
from outlast.errors import RestartAbort
from outlast.inprocess.running_call import RunningCall, long_phase


class Ending:
    """The end of one job. In a wrapped `call`, a fault is followed by a restart: signals are still
    requests then, and the state of the last step is kept.

    Attributes:
        released: whether the job has ended without a fault that is followed by a restart.
    """

    def __init__(
        self,
        call: RunningCall | None,
        checkpointer: Checkpointer,
        checks: JobChecks,
        saves: Saves,
        restoring: Restoring,
        stop: StopSignals,
    ) -> None:
        self._call, self._checkpointer, self._checks = call, checkpointer, checks
        self._saves, self._restoring, self._stop = saves, restoring, stop
        self._timeout_s = checkpointer.kept.timeout_s or None
        self.released = False

    def save_for_stop(self) -> None:
        """The last save of a job that was told to stop."""
        self._checks.compare_now(self._stop.grace_s)
        self._saves.save_if_changed()

    def complete(self, steps: int) -> None:
        """The program has left the `with` block without an error: saves its state. Until this is
        done, nothing is released: after a fault, a restart in place continues with this state.

        Raises:
            RestartAbort: in a wrapped call, if the state cannot be saved. A restart would train
                again from a checkpoint.
            CheckpointError: without a wrapped call, the same.
        """
        try:
            with long_phase(self._timeout_s):
                if steps:
                    self._checks.compare_now(self._stop.grace_s)
                self._checks.close()
        except Exception as e:
            self.fail(type(e))  # what the checks raise ends the job as an error of the program
            raise
        try:
            if steps:
                self._saves.complete()
        except NotSaved as e:
            self._checkpointer.__exit__(NotSaved)
            self._release()
            if self._call is None:
                raise
            raise RestartAbort(str(e)) from e
        with long_phase(self._timeout_s):
            self._checkpointer.close()
        self._release()

    def fail(self, kind: type[BaseException]) -> None:
        """The program has left the `with` block with an error."""
        with long_phase(self._timeout_s):
            self._checks.close()
            self._checkpointer.__exit__(kind)

    def leave(self) -> None:
        """The last call at the end of the `with` block."""
        if self._call is None:
            self._release()

    def close(self) -> None:
        """Ends a job without a last save.

        Raises:
            CheckpointError: if a save failed.
        """
        self._checks.close()
        self._release()
        with long_phase(self._timeout_s):
            self._checkpointer.close()

    def _release(self) -> None:
        self.released = True
        self._restoring.close()
        self._stop.close()
