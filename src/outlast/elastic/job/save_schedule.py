"""Decides when a save is due: every N steps or T seconds, after the same step on all ranks."""

from __future__ import annotations

import datetime
import numbers
import time

from outlast.coordination.call_ledger import CallLedger
from outlast.system.arguments import as_int, as_timedelta


class SaveSchedule:
    """Decides, step by step, whether to save; never if `every` is `None`."""

    def __init__(self, every: object, ledger: CallLedger) -> None:
        self._every = check_interval(every)
        self._ledger = ledger
        self._next: int | None = None
        self._start_step = 0
        self._start_time = time.monotonic()

    def start(self, steps: int) -> None:
        """Starts to measure time, after `steps` steps."""
        self._next, self._start_step, self._start_time = None, steps, time.monotonic()

    def is_due(self, steps: int) -> bool:
        """Whether to save after `steps` steps. Call it after every step, on all ranks."""
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
    """Checks and converts the interval of a `SaveSchedule`.

    Raises:
        TypeError: if it is not a number of steps, a `datetime.timedelta` or `None`.
        ValueError: if it is less than one step, or not a positive time.
    """
    if every is None:
        return None
    if isinstance(every, datetime.timedelta):
        return as_timedelta("every", every)
    if isinstance(every, bool) or not isinstance(every, numbers.Integral):
        raise TypeError(f"every must be a number of steps, a timedelta or None, not {every!r}")
    return as_int("every", every, at_least=1)
