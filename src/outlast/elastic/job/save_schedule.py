"""When a save is due: every so many steps, or every so often, after the same step on all ranks."""

from __future__ import annotations

import datetime
import time

from outlast.coordination.call_ledger import CallLedger

__all__ = ["Due", "check"]


class Due:
    """One rank's view of it.

    Args:
        every: steps between two saves, or time; `None` for never. See `check`.
        ledger: in which the ranks agree on a step.
    """

    def __init__(self, every: int | datetime.timedelta | None, ledger: CallLedger) -> None:
        self._every = every
        self._ledger = ledger
        self._at: int | None = None
        self._from = 0
        self._since = time.monotonic()

    def begin(self, steps: int) -> None:
        """The time runs from here, where `steps` are done."""
        self._at, self._from, self._since = None, steps, time.monotonic()

    def comes(self, steps: int) -> bool:
        """Whether it is due now that `steps` are done. Asked after every step, on all ranks."""
        if self._every is None:
            return False
        if isinstance(self._every, int):
            return steps % self._every == 0
        if self._at is None or steps >= self._at:
            self._at = self._agreed(steps, self._every)
        if steps < self._at:
            return False
        self.begin(steps)
        return True

    def _agreed(self, steps: int, every: datetime.timedelta) -> int:
        """This step, if the time is over; else that at which it will be, as far as one can tell
        from the steps so far, or to look again: a few slow steps say little about many. The first
        rank that gets here says it, and all go by that.
        """
        done = steps - self._from
        spent = max(time.monotonic() - self._since, 1e-6)
        left = max(every.total_seconds() - spent, 0.0)
        ahead = min(round(left * done / spent), 3 * done)
        return int(self._ledger.agree(f"due/{self._from}/{steps}", str(steps + ahead)))


def check(every: int | datetime.timedelta | None) -> None:
    """Looks at what `Due` is to be given.

    Raises:
        ValueError: if it is not at least a step, or no longer than nothing.
    """
    if isinstance(every, int) and every < 1:
        raise ValueError(f"every={every} must be at least 1")
    if isinstance(every, datetime.timedelta) and every <= datetime.timedelta():
        raise ValueError(f"every={every} must be longer than nothing")
