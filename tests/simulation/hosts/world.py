"""The world of a simulation: its true time, its events in order, the links that are cut, and the
clocks of its hosts.
"""

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

    def random_cut(self, host: str, others: list[str]) -> set[tuple[str, str]]:
        """One link of a host, all of its links, or those between two halves; or one way only."""
        r = self.random
        r.shuffle(others)
        kind, apart = r.randrange(4), [host]
        if kind == 0:
            others = others[:1]
        elif kind == 1:
            apart += others[: len(others) // 2]
        links = {(a, b) for a in apart for b in others if b not in apart}
        back = {(b, a) for a, b in links}
        return r.choice([links, back, links | back, links | back])

    def must(self, holds: bool, what: str) -> None:
        """Ends the run if an invariant is broken."""
        assert holds, f"{what} (at {self.now:.3f} s)"


class HostClock:
    """The clock of a host: its rate is `slowest`, or faster by up to `spread`."""

    def __init__(self, r: random.Random, slowest: float, spread: float) -> None:
        self.rate = slowest + spread * r.random()
        self._offset = 1000 * r.random()

    def clock(self, true: float) -> float:
        """What it shows."""
        return self._offset + true * self.rate

    def true(self, clock: float) -> float:
        """The reverse of `clock`."""
        return (clock - self._offset) / self.rate
