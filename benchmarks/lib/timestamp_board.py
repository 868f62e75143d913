"""Shared memory for timestamps of all ranks on one host, without files or locks."""

from __future__ import annotations

import mmap
import time

__all__ = ["TimestampBoard"]


class TimestampBoard:
    """Created before the ranks are forked; every word has one writer at a time.

    Args:
        slots: the number of rank processes; a replacement takes the slot of the dead rank.
        iterations: the maximum number of iterations that are recorded.
    """

    def __init__(self, slots: int, iterations: int) -> None:
        self.slots, self.iterations = slots, iterations
        words = 8 + iterations * (slots + 3)
        self._map = mmap.mmap(-1, 8 * words)
        self._words = memoryview(self._map).cast("d")

    @property
    def faults(self) -> int:
        """The number of faults so far."""
        return int(self._words[0])

    @property
    def joins(self) -> int:
        """The number of replacements that have asked to join."""
        return int(self._words[1])

    @property
    def newest(self) -> int:
        """The newest iteration that any rank has entered."""
        return int(self._words[2])

    def enter(self, iteration: int, slot: int, now: float) -> None:
        """Records that `slot` has entered the function."""
        if iteration < self.iterations:
            self._words[self._row(iteration) + slot] = now
            self._words[2] = iteration

    def fail(self, iteration: int, slot: int) -> None:
        """Records that `slot` fails now; its last call before the fault."""
        row = self._row(iteration) + self.slots
        self._words[row + 1] = slot
        self._words[0] += 1
        self._words[row] = time.monotonic()

    def join(self) -> None:
        """Records that a replacement is about to call the wrapped function."""
        self._words[8 + self.joins * (self.slots + 3) + self.slots + 2] = time.monotonic()
        self._words[1] += 1

    def fault(self, iteration: int) -> tuple[float, int] | None:
        """The time and the slot of the fault of an iteration."""
        row = self._row(iteration) + self.slots
        return (self._words[row], int(self._words[row + 1])) if self._words[row] else None

    def join_time(self, number: int) -> float:
        """When replacement `number` asked to join, counted from 0."""
        return float(self._words[8 + number * (self.slots + 3) + self.slots + 2])

    def row(self, iteration: int) -> list[float]:
        """When each slot entered an iteration; 0 if it has not."""
        first = self._row(iteration)
        return list(self._words[first : first + self.slots])

    def all_entered(self, iteration: int) -> bool:
        """Whether every slot has entered an iteration."""
        return all(self.row(iteration))

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
