"""Waits that can be broken off.

torch's stores wait in C++, where neither Ctrl-C nor a restart in place arrives. So a thread waits
there, and whoever needs the answer waits for that thread, in Python.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from outlast.errors import CheckpointError

__all__ = ["Wait"]

T = TypeVar("T")


class Wait(Generic[T]):
    """A thread that waits in C++, so that whoever waits for it waits in Python."""

    def __init__(self, wait: Callable[[], T]) -> None:
        self.over = threading.Event()
        self._wait = wait
        self._value: T | None = None
        self._error: Exception | None = None
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="outlast-replicas", daemon=True)
        self._thread.start()

    def result(self) -> T:
        """What came of it, once it is over."""
        self.over.wait()
        if self._given_up:
            raise CheckpointError("the process group of this call is gone")
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def give_up(self) -> None:
        """It is over. The thread ends with the store, or with what it waits for."""
        self._given_up = True
        self.over.set()

    def _run(self) -> None:
        try:
            self._value = self._wait()
        except Exception as e:  # noqa: BLE001 - raised again by who waits
            self._error = e
        self.over.set()
