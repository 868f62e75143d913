"""The monotonic clock as a protocol: the system clock, and a fake clock for tests.

Every duration in `outlast` is measured on such a clock. Times of different hosts are never
compared.
"""

from __future__ import annotations

import time
from typing import Protocol, runtime_checkable

__all__ = ["Clock", "FakeClock", "MonotonicClock"]


@runtime_checkable
class Clock(Protocol):
    """A source of monotonic time, in seconds from an arbitrary origin."""

    def now(self) -> float:
        """The current time, in seconds. It never decreases."""
        ...


class MonotonicClock:
    """The system's monotonic clock. On Linux all processes of one host share its origin."""

    def now(self) -> float:
        return time.monotonic()


class FakeClock:
    """A clock that moves only when `advance` is called; for simulation and tests."""

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
