"""How long to wait before replacing a rank that dies repeatedly."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class BackOff:
    """Doubles the wait with each consecutive death soon after a start.

    A long-lived process ends the series: its death says nothing about the next process. The first
    death of a series is replaced at once, so that a single fault costs no wait.

    Attributes:
        first_s: the first wait that is not zero.
        limit_s: the longest wait.
        soon_s: a process that lived shorter than this died soon.
    """

    first_s: float = 1.0
    limit_s: float = 60.0
    soon_s: float = 10.0

    def delay_s(self, lifetimes_s: Sequence[float]) -> float:
        """The wait before the next process of a rank, given the lifetimes of the earlier ones."""
        short_lived = itertools.takewhile(lambda s: s < self.soon_s, reversed(lifetimes_s))
        deaths = sum(1 for _ in short_lived)
        if deaths < 2:
            return 0.0
        # The exponent is bounded because a float overflows at 2**1024.
        return float(min(self.first_s * 2.0 ** min(deaths - 2, 64), self.limit_s))
