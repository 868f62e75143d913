"""How long to wait before a rank is replaced that dies again and again. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

__all__ = ["BackOff"]


@dataclasses.dataclass(frozen=True)
class BackOff:
    """Doubles the wait for each death in a row that came soon after a start.

    A process that lived long ends the row: what killed it says nothing about the next one. The
    first death of a row is replaced at once, so that a fault that happens once costs nothing.

    Attributes:
        first_s: the first wait that is not zero.
        limit_s: the longest wait.
        soon_s: a process that lived shorter than this died soon.
    """

    first_s: float = 1.0
    limit_s: float = 60.0
    soon_s: float = 10.0

    def delay_s(self, lifetimes_s: Sequence[float]) -> float:
        """The wait before the next process of a rank whose processes lived so long, in order."""
        row = 0
        for lifetime in reversed(lifetimes_s):
            if lifetime >= self.soon_s:
                break
            row += 1
        if row < 2:
            return 0.0
        # The exponent is bounded because a float overflows at 2**1024, not because it matters.
        return float(min(self.first_s * 2.0 ** min(row - 2, 64), self.limit_s))
