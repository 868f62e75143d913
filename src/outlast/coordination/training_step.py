"""The progress of this process: the training step that it has reached, how often the function has
been left because of a fault, and whether it has gone into reserve.

`Job.step` and `Checkpointer.save` report steps; `inprocess.Wrapper`, which does not know them, uses
them to tell a fault that comes back from one after progress, and fault injection to fire at a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_observers: list[Callable[[int, bool], None]] = []


def report_step(step: int, *, completed: bool = False) -> None:
    """Reports that this process has trained `step` steps since the beginning of the training.

    Args:
        completed: whether it has just completed that step, and reports each one so.
    """
    for observer in tuple(_observers):
        observer(int(step), completed)


@contextmanager
def observed_steps(observer: Callable[[int, bool], None]) -> Iterator[None]:
    """Calls `observer` with every reported step, and whether it has just been completed, in the
    thread that reports it.
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


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
