"""The progress of this process: the training step that it has reached, where its loop is, how often
the function has been left because of a fault, and whether it has gone into reserve.

`Job.step` and `Checkpointer.save` report steps; `inprocess.Wrapper`, which does not know them, uses
them to tell a fault that comes back from one after progress, and fault injection to fire at a step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from outlast.events.hung_ranks import BETWEEN, IN_SAVE, IN_STEP, NO_MORE

_observers: list[Callable[[int, bool], None]] = []


def report_step(step: int, *, completed: bool = False) -> None:
    """Reports that this process has trained `step` steps since the beginning of the training.
    `completed`: whether it has just completed that step, and reports each one so.
    """
    if completed:
        loop.made = int(step)
        loop.at = BETWEEN if loop.at else ""
    for observer in tuple(_observers):
        observer(int(step), completed)


@contextmanager
def observed_steps(observer: Callable[[int, bool], None]) -> Iterator[None]:
    """Calls `observer` for each step, where it is reported; also with whether just completed."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


_RECENT_NS = 2_000_000_000


class Wait(NamedTuple):
    """A wait of this process for other ranks, in a collective; `place` as `Loop.place`."""

    place: tuple[int, int, str]
    seconds: float
    ended_ns: int

    def is_recent(self, now_ns: int) -> bool:
        """Whether it has ended about now: perhaps by an abort, of which all ranks learn then."""
        return now_ns - self.ended_ns < _RECENT_NS


_NO_WAIT = Wait((-1, 0, ""), 0.0, 0)


@dataclasses.dataclass
class Loop:
    """Where the training loop is: what a hang report says of it. Set by the loops of a `Job`."""

    made: int = -1  # steps since the beginning of the training; -1 if unknown
    # Since the state was restored: how many passes over a loader have come to their end, or the
    # job's `with` block has; and how many batches they have yielded.
    passes: int = 0
    taken: int = 0
    at: str = ""  # one of the constants of `events.hung_ranks`; empty if unknown
    wait: Wait = _NO_WAIT

    def begin(self, made: int = -1) -> None:
        self.made, self.passes, self.taken, self.at = made, 0, 0, ""

    @property
    def place(self) -> tuple[int, int, str]:
        return self.made, self.passes, self.at

    def note_wait(self, seconds: float) -> None:
        """A wait for other ranks has just ended: the loop is where it was in it."""
        if seconds >= self.wait.seconds or not self.wait.is_recent(time.time_ns()):
            self.wait = Wait(self.place, seconds, time.time_ns())

    def take(self) -> None:
        self.taken, self.at = self.taken + 1, IN_STEP

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The program has asked for a save: all ranks have to come."""
        before, self.at = self.at, f"{self.at}{IN_SAVE}"
        try:
            yield
        finally:
            self.at = before

    def end(self, at: str) -> None:
        """A pass has come to its end, or the `with` block has."""
        self.passes += 1
        self.at = self.at if self.at == NO_MORE else at


loop = Loop()


_restarts = 0


def restart_count() -> int:
    """How often the training function has been left because of a fault. Only changes mean
    something: an object that was made before the count changed belongs to an iteration that is
    over. A new one may take its place, although the old one was never closed.
    """
    return _restarts


def count_restart() -> None:
    """Counts: the training function has been left, and may be called again."""
    global _restarts
    _restarts += 1


reserve_observers: list[Callable[[], None]] = []
"""Called when this process is in reserve in the next iteration, before any rank enters that."""


def go_into_reserve() -> None:
    """The next iteration is without this process: if it was rank 0, another is that now."""
    for observer in tuple(reserve_observers):
        observer()
