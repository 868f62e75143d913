"""`FakeClock`: a clock that moves only when a test or the simulation moves it."""

from __future__ import annotations


class FakeClock:
    """A `Clock` that moves only when `advance` is called."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock forward by `seconds`.

        Raises:
            ValueError: if `seconds` is negative; monotonic time does not run backwards.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back: seconds={seconds}")
        self._now += seconds
