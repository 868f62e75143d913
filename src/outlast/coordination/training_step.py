"""The training step that this process has reached, from what counts steps to what follows progress.

`Job.step` and `Checkpointer.save` report it; `inprocess.Wrapper`, which does not know them, uses it
to tell a fault that comes back from one after progress, and fault injection to fire at a step.
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
