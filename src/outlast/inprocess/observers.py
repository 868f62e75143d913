"""Observers of wrapped calls: they see a rank enter the function and make progress.

For fault injection and profilers.
"""

from __future__ import annotations

from typing import Protocol

from outlast.inprocess.state import State

__all__ = ["ObservedCall", "Observer", "add_observer", "observers", "remove_observer"]


class ObservedCall(Protocol):
    """What an observer sees of a `CallWrapper`."""

    state: State
    monitor_pid: int | None

    @property
    def iteration(self) -> int:
        """The number of restarts so far."""
        ...


class Observer(Protocol):
    """Called in the function's thread, as part of the function: an exception that it raises is
    one of the function, and it may be interrupted.
    """

    def entered(self, call: ObservedCall) -> None:
        """Called just before the function, in every iteration."""
        ...

    def pinged(self, call: ObservedCall, pings: int) -> None:
        """Called at each `call.ping()`; `pings` counts from 1 in every iteration."""
        ...


_observers: list[Observer] = []


def add_observer(observer: Observer) -> None:
    """Adds an observer to every wrapped call of this process."""
    _observers.append(observer)


def remove_observer(observer: Observer) -> None:
    """Removes an observer.

    Raises:
        ValueError: if it was not added.
    """
    _observers.remove(observer)


def observers() -> tuple[Observer, ...]:
    """All observers, in the order in which they were added."""
    return tuple(_observers)
