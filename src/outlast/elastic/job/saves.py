"""The saves of a job, and the last one: a completed state is not given up because a save failed."""

from __future__ import annotations

import contextlib
import datetime
import logging
import numbers
import time
from collections.abc import Callable, Collection

from outlast.async_checkpoint import Checkpointer, SaveHandle
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.store import KeyTimeout
from outlast.elastic.job.training_state import TrainingState
from outlast.errors import CheckpointError, SaveCancelled, StoreError
from outlast.inprocess.running_call import long_phase
from outlast.system.arguments import as_int, as_timedelta
from outlast.system.error_text import describe, first_line

log = logging.getLogger("outlast.elastic")

PAUSES_S = (1.0, 10.0)
"""How long to wait before the second attempt of the last save, and before the third."""

Progress = tuple[int, tuple[int | None, int | None, int]]
"""How far a job is: the steps, and where it is in its epochs."""


class NotSaved(CheckpointError):
    """The last save of a job has failed for good: says what is in memory, and on storage."""


class Saves:
    """Saves the state of one job, and knows whether the present state is saved. All ranks call its
    methods together. `finite` returns the entries of the state that must be finite.
    """

    def __init__(
        self,
        training: TrainingState,
        checkpointer: Checkpointer,
        ledger: CallLedger,
        path: str,
        finite: Callable[[], Collection[str]],
    ) -> None:
        self._training, self._finite = training, finite
        self._checkpointer, self._ledger, self._path = checkpointer, ledger, path
        self._handle: SaveHandle | None = None
        self._saved: Progress | None = None
        self._restored: Progress | None = None

    @property
    def _progress(self) -> Progress:
        return self._training.counters.steps, self._training.epochs.progress

    def restored(self) -> None:
        self._handle, self._saved, self._restored = None, None, self._progress

    def save(self, metric: float | None = None) -> SaveHandle:
        step = self._training.counters.steps
        if self._handle is not None and self._handle.step == step:
            self._checkpointer.wait()  # `Job.step` has just saved: this save replaces that one
        if self._training.consistent_ddp is not None:
            self._training.consistent_ddp.average_statistics()
        state = self._training.state_dict()
        self._handle = self._checkpointer.save(step, state, metric=metric, finite=self._finite())
        self._saved = self._progress
        return self._handle

    def save_if_changed(self) -> None:
        """Begins a save, unless the present state is being saved, or is committed. A state that was
        restored may be in memory only.
        """
        if not self._is_saved():
            self.save()

    def _is_saved(self) -> bool:
        if self._saved == self._progress:
            return True
        if self._restored != self._progress:
            return False
        step = self._training.counters.steps
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
        is_saved = self._ledger.agree(f"last-save/{number}/before", str(self._is_saved()))
        try:
            if is_saved != str(True):
                self.save().wait()
        except CheckpointError as e:
            _raise_if_ending(e)
            return e
        return None

    def _what_is_where(self, attempts: int, cause: str) -> str:
        step = self._training.counters.steps
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


class SaveSchedule:
    """Decides, step by step, whether to save: every N steps or T seconds, after the same step on
    all ranks; never if `every` is `None`.
    """

    def __init__(self, every: int | datetime.timedelta | None, ledger: CallLedger) -> None:
        self._every, self._ledger = every, ledger
        self._next: int | None = None
        self._start_step, self._start_time = 0, time.monotonic()

    def start(self, steps: int) -> None:
        self._next, self._start_step, self._start_time = None, steps, time.monotonic()

    def is_due(self, steps: int) -> bool:
        if self._every is None:
            return False
        if isinstance(self._every, int):
            return steps % self._every == 0
        if self._next is None or steps >= self._next:
            self._next = self._agree_on_step(steps, self._every)
        if steps < self._next:
            return False
        self.start(steps)
        return True

    def _agree_on_step(self, steps: int, every: datetime.timedelta) -> int:
        """The current step if the time has passed; otherwise a later one, to save or to estimate
        again: the step at which the time will have passed, at the average step duration so far, but
        at most four times the steps so far, since a few slow steps predict little. The first rank's
        estimate holds for all.
        """
        done = steps - self._start_step
        elapsed = max(time.monotonic() - self._start_time, 1e-6)
        left = max(every.total_seconds() - elapsed, 0.0)
        ahead = min(round(left * done / elapsed), 3 * done)
        key = f"save-due/{self._start_step}/{steps}"
        return int(self._ledger.agree(key, str(steps + ahead)))


def check_interval(every: object) -> int | datetime.timedelta | None:
    """Checks and converts the interval of a `SaveSchedule`."""
    if every is None:
        return None
    if isinstance(every, datetime.timedelta):
        return as_timedelta("every", every)
    if isinstance(every, bool) or not isinstance(every, numbers.Integral):
        raise TypeError(f"every must be a number of steps, a timedelta or None, not {every!r}")
    return as_int("every", every, at_least=1)
