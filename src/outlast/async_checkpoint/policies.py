"""Policies of a checkpointer: how many failures in a row it tolerates (`FailurePolicy`, also for a
queue of background calls), and which checkpoints it keeps (`Retention`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import numbers
from collections.abc import Sequence
from typing import Literal

from outlast.async_checkpoint.storage.directory import CheckpointInfo
from outlast.errors import OutlastError
from outlast.system.arguments import as_int
from outlast.system.error_text import message

log = logging.getLogger("outlast.async_checkpoint")


class FailurePolicy:
    """Tolerates failures, but not forever: training that saves nothing is lost work.

    A failure is logged as a warning, on the rank that failed: what failed and why, that training
    continues, and below that the traceback of a mistake. Every rank counts the same failures, so
    all ranks continue, or none.

    Args:
        max_in_a_row: how many failures in a row are tolerated; the next one is raised.

    Attributes:
        failures: the number of failures.
        in_a_row: the number of failures since the last success.
        last: the latest error, or `None`.
    """

    def __init__(self, max_in_a_row: int = 3) -> None:
        self.max_in_a_row = as_int("max_in_a_row", max_in_a_row, at_least=0)
        self.failures = 0
        self.in_a_row = 0
        self.last: Exception | None = None

    def succeeded(self) -> None:
        self.in_a_row = 0

    def failed(self, error: Exception) -> bool:
        """Counts a failure. Returns whether to tolerate it."""
        self.failures += 1
        self.in_a_row += 1
        self.last = error
        if self.in_a_row > self.max_in_a_row:
            return False
        # The message of an error on another rank ends with that rank's traceback.
        what, _, details = message(error).partition("\n")
        another = isinstance(error, OutlastError) and error.of_another_rank
        log.log(
            logging.INFO if another else logging.WARNING,
            "%s. Training continues: failure %d of at most %d in a row is tolerated%s",
            what.removesuffix("."),
            self.in_a_row,
            self.max_in_a_row,
            f"\n{details}" if details else "",
        )
        return True


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: those that at least one rule keeps; all, without rules.

    A checkpoint is removed only after the commit of a newer one, which itself is never removed. Nor
    is the newest checkpoint whose parameters are all finite, where that is known (`save(finite=)`):
    a training that has diverged cannot continue from the others. If the one that was committed is
    known not to be finite, and no other is known to be, the newest one of which that is not known
    stays.

    Attributes:
        last: how many of the newest are kept.
        every: checkpoints whose step is a multiple of it are kept.
        best: how many of the best by `save(metric=...)` are kept; those saved without a metric,
            or with NaN, do not count.
        mode: whether the best metric is the greatest (`"max"`) or the least (`"min"`).
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, as_int(name, value, at_least=1))
        if self.mode not in ("max", "min"):
            raise ValueError(f"mode={self.mode!r} is neither 'max' nor 'min'")

    @classmethod
    def of(cls, keep: Retention | int | None) -> Retention:
        """The value of an argument `keep`: a number is that of the newest checkpoints."""
        if keep is None:
            return cls()
        if isinstance(keep, Retention):
            return keep
        if isinstance(keep, bool) or not isinstance(keep, numbers.Integral):
            raise TypeError(f"keep must be a Retention or an int, not {keep!r}")
        return cls(last=as_int("keep", keep, at_least=1))

    @property
    def keeps_all(self) -> bool:
        return self.last is None and self.every is None and self.best is None

    def removable(
        self, checkpoints: Sequence[CheckpointInfo], committed: int
    ) -> list[CheckpointInfo]:
        """The checkpoints that may be removed after the commit of step `committed`."""
        # If the commit cannot be seen, the others are all there is.
        if self.keeps_all or all(info.step != committed for info in checkpoints):
            return []
        ordered = sorted(checkpoints, key=lambda info: info.step)
        kept = {committed, self._usable(ordered, committed)}
        if self.last is not None:
            kept.update(info.step for info in ordered[-self.last :])
        if self.every is not None:
            kept.update(info.step for info in ordered if info.step % self.every == 0)
        if self.best is not None:
            # NaN, from a run that diverged, is never the best, and cannot be sorted.
            rated = [
                (info.metric, info.step)
                for info in ordered
                if info.metric is not None and not math.isnan(info.metric)
            ]
            rated.sort(key=lambda one: one[0], reverse=self.mode == "max")
            kept.update(step for _, step in rated[: self.best])
        return [info for info in ordered if info.step not in kept]

    def removable_before(
        self, checkpoints: Sequence[CheckpointInfo], planned: int
    ) -> tuple[list[CheckpointInfo], int]:
        """Those of `removable` that may go before the commit of step `planned`, and the step of the
        one that training can continue from until then. That one stays, and so does the newest.
        """
        ordered = sorted(checkpoints, key=lambda info: info.step)
        if not ordered:
            return [], planned
        newest = ordered[-1].step
        usable = self._usable(ordered, newest)
        there = [info for info in ordered if info.step != planned]
        new = CheckpointInfo(planned, "", 0, 0, None, 0)
        removable = self.removable([*there, new], planned)
        return [info for info in removable if info.step not in (newest, usable)], usable

    @staticmethod
    def _usable(ordered: Sequence[CheckpointInfo], committed: int) -> int:
        """The step of the newest checkpoint that training can continue from, as far as known."""
        finite = [info.step for info in ordered if info.finite]
        if finite:
            return finite[-1]
        wrong = any(info.step == committed and info.finite is False for info in ordered)
        unknown = [info.step for info in ordered if info.finite is None]
        return unknown[-1] if wrong and unknown else committed
