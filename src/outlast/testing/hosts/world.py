"""The world of a simulation: its true time, its events in order, and the links that are cut."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import Any


class World:
    """Events happen in the order of one true time; all chance is from one seed.

    Attributes:
        cut: links on which nothing arrives, each one way.
        sometimes: how often rare branches were taken.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.cut: set[tuple[str, str]] = set()
        self.sometimes: Counter[str] = Counter()
        self.events = 0
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, what: Callable[..., object], *args: Any) -> None:
        """Plans an event."""
        self._count += 1
        heapq.heappush(self._queue, (when, self._count, what, args))

    def run(self, until: float) -> None:
        """Lets all events happen up to a time."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, what, args = heapq.heappop(queue)
            self.events += 1
            what(*args)
        self.now = until

    def must(self, holds: bool, what: str) -> None:
        """Ends the run if an invariant is broken."""
        assert holds, f"{what} (at {self.now:.3f} s)"
