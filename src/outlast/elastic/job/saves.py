"""The saves of a job, and when they are due; `ending.py` has the last one."""

from __future__ import annotations

import contextlib
import datetime
import logging
import numbers
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from outlast.async_checkpoint import Checkpointer, SaveHandle
from outlast.coordination.agreement import Agreement
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.waits import waits
from outlast.elastic.job.training_state import TrainingState
from outlast.errors import OutlastError, TornSnapshot
from outlast.system.arguments import as_int, as_timedelta

log = logging.getLogger("outlast.elastic")


class Progress(NamedTuple):
    """How far a job is: a state of the same progress is saved once."""

    steps: int
    lacks_rest: bool  # the rest of the loop's body was not run
    epochs: tuple[int | None, int | None, int]  # as `Epochs.progress`


class Saves:
    """Saves one job's state, on all ranks. `finite` returns what must be finite; `schedule`
    says when a save is due.
    """

    def __init__(
        self,
        training: TrainingState,
        checkpointer: Checkpointer,
        finite: Callable[[], Collection[str]],
        every: int | datetime.timedelta | None,
    ) -> None:
        self._training, self._finite, self._checkpointer = training, finite, checkpointer
        self._ledger = checkpointer.ledger
        self.schedule = SaveSchedule(every, self._ledger)
        ranks, again = checkpointer.ranks, self._ledger.child("again")
        self._again = SaveAgain(Agreement(again, ranks.timeout_s, checkpointer.session.url))
        checkpointer.saves.torn = self._again.ask
        self._beside = partial(training.beside, self._ledger)
        self._handle: SaveHandle | None = None
        self._saved: Progress | None = None
        self._restored: Progress | None = None
        self._metric: tuple[int, float] | None = None  # of a step
        checkpointer.resumes_saves = False  # `restored` does

    @property
    def _progress(self) -> Progress:
        training = self._training
        lacks_rest = bool(training.iteration.rest)
        return Progress(training.counters.steps, lacks_rest, training.epochs.progress)

    @property
    def place(self) -> str:
        """Where this rank is, in words: all ranks save at the same place."""
        return f"{self._training.counters.steps} steps{self._training.epochs.place}"

    @property
    def step(self) -> int:
        return self._training.counters.steps

    @property
    def has_trained(self) -> bool:
        return bool(self.step or self._training.epochs.place)

    def restored(self) -> bool:
        """Also completes the saves with a metric that a fault has cut off. Returns whether that of
        the present step must be made again.
        """
        self._handle, self._saved, self._restored = None, None, self._progress
        left, again = self._checkpointer.restorer.take_left(self.step), False
        handles = self._checkpointer.saves.resume_left(
            left, self._training.files.sync, self._finite()
        )
        for each, handle in zip(left, handles, strict=True):
            if each.step == self.step:
                self.set_metric(each.metric)
                self._handle, again = handle or self._handle, handle is None
            elif handle is None and self._ledger.rank == 0:
                log.warning(
                    "the save of step %d, with the metric %g, was cut off by a fault and cannot be "
                    "completed, because a rank has lost its snapshot: its checkpoint is missing",
                    each.step,
                    each.metric,
                )
        return again

    def set_metric(self, metric: float | None) -> None:
        """All saves of the present step have this metric, also one that replaces another."""
        if metric is not None:
            self._metric = self.step, metric

    def is_due(self) -> bool:
        """Whether all ranks save after this step, on schedule or because a snapshot was torn."""
        self._checkpointer.saves.seal_all()  # each learns of that without a further step
        return self._again.is_due(self.step) | self.schedule.is_due(self.step)

    def save(self) -> SaveHandle:
        if self._handle is not None and self._handle.step == self.step:
            # `Job.step` has just saved: this save replaces that one.
            with contextlib.suppress(TornSnapshot):
                self._handle.wait()
        self._handle = self.save_to(self._checkpointer)
        self._saved = self._progress
        return self._handle

    def save_to(self, checkpointer: Checkpointer) -> SaveHandle:
        """Saves the present state, also somewhere else."""
        checkpointer.saves.beside = self._beside
        step, finite = self.step, self._finite()
        metric = self._metric[1] if self._metric is not None and self._metric[0] == step else None
        if self._training.consistent_ddp is not None:
            self._training.consistent_ddp.average_statistics()
        state = self._training.state_dict()
        return checkpointer.save(step, state, metric=metric, finite=finite, place=self.place)

    def seal(self) -> None:
        """Waits for the copy of the present save: what follows may write to the tensors."""
        if self._handle is not None:
            self._handle._seal()

    def changed(self) -> None:
        """The present state is not that which is saved, or being saved."""
        self._saved = self._restored = None

    def failed(self) -> None:
        """The present state is neither saved nor being saved."""
        self._handle = None
        self.changed()

    def is_saved(self) -> bool:
        """Whether the state is being saved or committed; a restored one may be only in memory."""
        if self._handle is not None and self._handle.done() and not self._handle.succeeded:
            self._saved = None
        if self._saved == self._progress:
            return True
        if self._restored != self._progress:
            return False
        committed = any(info.step == self.step for info in self._checkpointer.checkpoints())
        return self._ledger.agree(f"committed/{self.step}", str(committed)) == str(True)


class SaveSchedule:
    """Decides when all ranks save, after the same step: every N steps or T seconds, or never."""

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


class SaveAgain:
    """Agrees on the step after which all ranks save, since one of their snapshots was torn.

    When a rank learns that, in its thread of the saves (`ask`), it reports how many steps it has
    begun, and stops at a step boundary until all have reported. All ranks reach the greatest of
    these numbers, and none passes it: see `stop_agreement`.
    """

    def __init__(self, ranks: Agreement) -> None:
        self._ranks = ranks
        self._begun = 0  # steps, including the next one
        self._after: int | None = None
        self._is_asked, self._changed = False, threading.Condition()

    def ask(self) -> None:
        with self._changed:
            self._is_asked, begun = True, self._begun
        after = None
        try:
            # If a rank does not answer, the next save on schedule fails, or a restart comes first.
            with contextlib.suppress(OutlastError):
                after = max(self._ranks.exchange(begun))
        finally:
            with self._changed:
                self._is_asked, self._after = False, after
                self._changed.notify_all()

    def is_due(self, step: int) -> bool:
        """Whether all ranks save after this step. Call it after each, before the next begins."""
        with self._changed:
            if self._is_asked:
                with waits():
                    self._changed.wait_for(lambda: not self._is_asked)
            is_due = self._after is not None and step >= self._after
            if is_due:
                self._after = None
            self._begun = step + 1
            return is_due


def check_interval(every: object) -> int | datetime.timedelta | None:
    """Checks and converts the interval of a `SaveSchedule`."""
    if every is None:
        return None
    if isinstance(every, datetime.timedelta):
        return as_timedelta("every", every)
    if isinstance(every, bool) or not isinstance(every, numbers.Integral):
        raise TypeError(f"every must be a number of steps, a timedelta or None, not {every!r}")
    return as_int("every", every, at_least=1)
