"""Observers see ranks enter the wrapped function and make progress; for fault injection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from outlast.inprocess.call_wrapper import CallWrapper

__all__ = ["Observer", "add_observer", "observers", "remove_observer"]


class Observer(Protocol):
    """Called in the function's thread, as part of the function: what it raises is the function's
    exception, and it may be interrupted.
    """

    def entered(self, call: CallWrapper) -> None:
        """Just before the function, in every iteration."""
        ...

    def pinged(self, call: CallWrapper, pings: int) -> None:
        """At each `call.ping()`; `pings` counts from 1 in every iteration."""
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
