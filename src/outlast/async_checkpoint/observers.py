"""Observers of saves and restores, and another program for the writer process: for fault injection.

Nothing here imports torch.
"""

from __future__ import annotations

from typing import Literal, Protocol

_WRITER = "outlast.async_checkpoint.writer.main"


class Observer(Protocol):
    """Called as part of a save or restore, which an exception of an observer fails."""

    def saving(self) -> None:
        """Called in a save, on the training thread, before the snapshot is copied."""

    def committing(self) -> None:
        """Called on ranks other than 0, in the thread of the saves, when rank 0 commits."""

    def restoring(self) -> None:
        """Called in a restore, on the training thread, before the first tensor is loaded."""


_observers: list[Observer] = []
_program = _WRITER


def add_observer(observer: Observer) -> None:
    """Adds an observer to every checkpointer of this process."""
    _observers.append(observer)


def remove_observer(observer: Observer) -> None:
    """Removes an observer; a `ValueError` if it was not added."""
    _observers.remove(observer)


def notify(event: Literal["saving", "committing", "restoring"]) -> None:
    """Calls this method of every observer."""
    for observer in tuple(_observers):
        getattr(observer, event)()


def set_writer_program(module: str | None) -> None:
    """Lets later writers run `python -m module`, which calls `run_writer`; `None`: the default."""
    global _program
    _program = module or _WRITER


def writer_program() -> str:
    """The module that a new writer process runs."""
    return _program
