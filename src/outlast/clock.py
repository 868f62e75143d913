"""The monotonic clock as a protocol, so that tests can use a clock of their own.

Every duration in `outlast` is measured on such a clock. Times of different hosts are never
compared.
"""

from __future__ import annotations

import time
from typing import Protocol, runtime_checkable


@runtime_checkable
class Clock(Protocol):
    """A source of monotonic time, in seconds from an arbitrary origin."""

    def now(self) -> float:
        """The current time, in seconds. It never decreases."""
        ...


class MonotonicClock:
    """The system's monotonic clock. On Linux all processes of one host share its origin."""

    now = staticmethod(time.monotonic)
