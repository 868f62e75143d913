"""Shared memory that ranks stamp times into: one host, one monotonic clock, no file, no lock."""

from __future__ import annotations

import mmap
import time

__all__ = ["Board"]


class Board:
    """Made before the ranks are forked; every word has one writer at a time.

    Args:
        slots: rank processes; a replacement takes over the slot of the one that died.
        iterations: at most so many are stamped.
    """

    def __init__(self, slots: int, iterations: int) -> None:
        self.slots, self.iterations = slots, iterations
        words = 8 + iterations * (slots + 3)
        self._map = mmap.mmap(-1, 8 * words)
        self._words = memoryview(self._map).cast("d")

    @property
    def faults(self) -> int:
        """How many faults there were."""
        return int(self._words[0])

    @property
    def joins(self) -> int:
        """How many replacements have asked to come in."""
        return int(self._words[1])

    @property
    def newest(self) -> int:
        """The newest iteration that somebody has entered."""
        return int(self._words[2])

    def enter(self, iteration: int, slot: int, now: float) -> None:
        """`slot` has entered the function."""
        if iteration < self.iterations:
            self._words[self._row(iteration) + slot] = now
            self._words[2] = iteration

    def fail(self, iteration: int, slot: int) -> None:
        """`slot` fails now: the last thing it does before."""
        row = self._row(iteration) + self.slots
        self._words[row + 1] = slot
        self._words[0] += 1
        self._words[row] = time.monotonic()

    def join(self) -> None:
        """A replacement is about to call the wrapped function."""
        self._words[8 + self.joins * (self.slots + 3) + self.slots + 2] = time.monotonic()
        self._words[1] += 1

    def fault(self, iteration: int) -> tuple[float, int] | None:
        """When and who failed in an iteration."""
        row = self._row(iteration) + self.slots
        return (self._words[row], int(self._words[row + 1])) if self._words[row] else None

    def join_time(self, number: int) -> float:
        """When the replacement `number` asked, counted from 0."""
        return float(self._words[8 + number * (self.slots + 3) + self.slots + 2])

    def entries_after(self, moment: float) -> dict[int, float]:
        """The first entry of each slot after `moment`."""
        found: dict[int, float] = {}
        for iteration in range(min(self.newest + 1, self.iterations)):
            row = self._row(iteration)
            for slot in range(self.slots):
                entered = self._words[row + slot]
                if entered > moment:
                    found.setdefault(slot, entered)
        return found

    def _row(self, iteration: int) -> int:
        return 8 + iteration * (self.slots + 3)
