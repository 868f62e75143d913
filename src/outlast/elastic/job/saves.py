"""The saves of a job, and the last one: a completed state is not given up because a save failed."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection

from outlast.async_checkpoint import Checkpointer, SaveHandle
from outlast.coordination import KeyTimeout
from outlast.coordination.call_ledger import CallLedger
from outlast.elastic.job.counters import Counters
from outlast.elastic.job.training_state import TrainingState
from outlast.errors import CheckpointError, SaveCancelled, StoreError
from outlast.inprocess.running_call import long_phase
from outlast.system.error_text import describe, first_line

log = logging.getLogger("outlast.elastic")

PAUSES_S = (1.0, 10.0)
"""How long to wait before the second attempt of the last save, and before the third."""

Place = tuple[int, tuple[int | None, int | None, int]]


class NotSaved(CheckpointError):
    """The last save of a job has failed for good: says what is in memory, and on storage."""


class Saves:
    """Saves the state of one job, and knows whether the present state is saved. All ranks call its
    methods together. `finite` returns the entries of the state that must be finite.
    """

    def __init__(
        self,
        training: TrainingState,
        counters: Counters,
        checkpointer: Checkpointer,
        ledger: CallLedger,
        path: str,
        finite: Callable[[], Collection[str]],
    ) -> None:
        self._finite = finite
        self._training, self._counters = training, counters
        self._checkpointer, self._ledger, self._path = checkpointer, ledger, path
        self._handle: SaveHandle | None = None
        self._saved: Place | None = None
        self._restored: Place | None = None

    @property
    def _place(self) -> Place:
        """How far the job is. At the same step it may be in the next epoch."""
        return self._counters.steps, self._training.epochs.place

    def restored(self) -> None:
        """The present state was restored."""
        self._handle, self._saved, self._restored = None, None, self._place

    def save(self, metric: float | None = None) -> SaveHandle:
        """Begins a save."""
        step = self._counters.steps
        if self._handle is not None and self._handle.step == step:
            self._checkpointer.wait()  # `Job.step` has just saved: this save replaces that one
        if self._training.consistent_ddp is not None:
            self._training.consistent_ddp.average_statistics()
        state = {**self._training.state_dict(), "counters": self._counters.state_dict()}
        self._handle = self._checkpointer.save(step, state, metric=metric, finite=self._finite())
        self._saved = self._place
        return self._handle

    def is_saved(self) -> bool:
        """Whether the present state is being saved, or is committed. A state that was restored may
        be in memory only.
        """
        if self._saved == self._place:
            return True
        if self._restored != self._place:
            return False
        step = self._counters.steps
        committed = any(info.step == step for info in self._checkpointer.checkpoints())
        return self._ledger.agree(f"committed/{step}", str(committed)) == str(True)

    def complete(self) -> None:
        """Returns once the present state is committed: training is complete. A save that fails is
        tried again.

        Raises:
            NotSaved: if the last attempt has failed, too.
            CheckpointError: if a fault of the job has ended the save, rather than the storage.
        """
        for attempt, pause in enumerate((*PAUSES_S, None), 1):
            with long_phase(self._checkpointer.kept.timeout_s or None):
                error = self._attempt(attempt)
            # One rank's outcome holds for all: all try again, or none.
            # The traceback of the writer follows in further lines, and is in the log.
            found = "" if error is None else first_line(error)
            cause = self._ledger.agree(f"last-save/{attempt}", found)
            if not cause:
                return
            if pause is None:
                raise NotSaved(self._what_is_where(attempt, cause)) from None
            if self._checkpointer.rank == 0:
                log.error("the last save failed, and is tried again in %g s: %s", pause, cause)
            self._handle = self._saved = self._restored = None
            self._await_all(attempt)
            time.sleep(pause)

    def _await_all(self, attempt: int) -> None:
        """Waits until this attempt has ended on all ranks. A rank whose part fails at once would
        otherwise use up its attempts while another one still writes its part of the first: before
        rank 0 has removed the files of that, whose room may be what is missing, and has logged it.
        """
        ended, timeout_s = self._ledger.child("last-save-ended"), self._checkpointer.kept.timeout_s
        # If a rank does not come in time, the next attempt says so.
        with long_phase(timeout_s or None), contextlib.suppress(KeyTimeout):
            ended.finish(attempt)
            ended.await_verdict(attempt, timeout_s)

    def _attempt(self, number: int) -> CheckpointError | None:
        """Waits until the state is committed; returns why it is not."""
        try:
            self._checkpointer.wait()
        except CheckpointError as e:
            _raise_if_ending(e)
            log.debug("a save before the last one has failed: %s", e)
        if self._handle is not None and not self._handle.succeeded:
            self._saved = None
        # It may not be known on all ranks whether the checkpoint of this step is committed.
        is_saved = self._ledger.agree(f"last-save/{number}/before", str(self.is_saved()))
        try:
            if is_saved != str(True):
                self.save().wait()
        except CheckpointError as e:
            _raise_if_ending(e)
            return e
        return None

    def _what_is_where(self, attempts: int, cause: str) -> str:
        step = self._counters.steps
        try:
            steps = [info.step for info in self._checkpointer.checkpoints()]
            newest = f"step {steps[-1]}" if steps else "none"
        except (CheckpointError, OSError) as e:
            newest = f"unknown: {describe(e)}"
        return (
            f"step {step}, the last one, is in memory only: {attempts} attempts to save it have "
            f"failed. On storage in {self._path}: {newest}. The failure: {cause}"
        )


def _raise_if_ending(error: CheckpointError) -> None:
    """Raises the error of a save that was dropped, or has lost the store: a fault ends the job, and
    the ranks do not try again together.
    """
    if isinstance(error, SaveCancelled) or isinstance(error.__cause__, StoreError):
        raise error
