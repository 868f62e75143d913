"""The training step that this process has reached, from what counts steps to what follows progress.

`Job.step` and `Checkpointer.save` report it; `inprocess.Wrapper`, which does not know them, uses it
to tell a fault that comes back from one after progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_observers: list[Callable[[int], None]] = []


def report_step(step: int) -> None:
    """Reports that this process has trained `step` steps since the beginning of the training."""
    for observer in tuple(_observers):
        observer(int(step))


@contextmanager
def observed_steps(observer: Callable[[int], None]) -> Iterator[None]:
    """Calls `observer` with every reported step, in the thread that reports it."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
