"""Observers of wrapped calls, for fault injection and profilers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from outlast.inprocess.call_wrapper import CallWrapper


class Observer(Protocol):
    """Called in the function's thread, as part of the function: it may be interrupted, and its
    exceptions count as the function's.
    """

    def entered(self, call: CallWrapper) -> None:
        """Called just before the function, in every iteration."""

    def pinged(self, call: CallWrapper, pings: int) -> None:
        """Called at each `call.ping()`; `pings` counts from 1 in every iteration."""

    def recovering(self, iteration: int, rank: int) -> None:
        """Called in a restart in place, as part of finalize and of initialize, which have these
        iterations: the one that has ended, and the one that begins.
        """


_observers: list[Observer] = []


def add_observer(observer: Observer) -> None:
    """Adds an observer to every wrapped call of this process."""
    _observers.append(observer)


def remove_observer(observer: Observer) -> None:
    """Removes an observer; a `ValueError` if it was not added."""
    _observers.remove(observer)


def observers() -> tuple[Observer, ...]:
    """All observers, in the order in which they were added."""
    return tuple(_observers)


def notify_recovering(iteration: int, rank: int) -> None:
    """Calls `recovering` of every observer."""
    for observer in tuple(_observers):
        observer.recovering(iteration, rank)
