"""Waits for descriptors, and for calls that block in C++, where Python cannot interrupt them."""

from __future__ import annotations

import select
import threading
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

from outlast.system.parallel import start_thread

T = TypeVar("T")


def readable(*descriptors: int, timeout: float | None = None) -> list[int]:
    """Waits up to `timeout` seconds; returns the descriptors that are readable, or closed."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    found = poll.poll(None if timeout is None else max(timeout, 0.0) * 1000)
    return [descriptor for descriptor, _ in found]


class ThreadedWait(Generic[T]):
    """A wait that blocks in C++, run in a thread, so that its caller waits in Python.

    torch's stores wait in C++, where neither Ctrl-C nor a restart in place can interrupt a thread.
    `over` is set when the wait has ended, or was abandoned.
    """

    def __init__(self, wait: Callable[[], T], name: str) -> None:
        self.over = threading.Event()
        self._value: T | None = None
        self._error: Exception | None = None
        self._abandoned: Exception | None = None
        # The thread forgets `wait` at its end: it may be a method of what holds this object.
        self._thread = start_thread(name, self._run, wait)

    def result(self) -> T:
        """Waits for the end; returns or raises what the wait did, or what it was abandoned with."""
        self.over.wait()
        if self._abandoned is not None:
            raise self._abandoned
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def abandon(self, error: Exception) -> None:
        """Makes `result` raise `error`. The thread continues until its wait or the store ends."""
        self._abandoned = error
        self.over.set()

    def _run(self, wait: Callable[[], T]) -> None:
        try:
            self._value = wait()
        except Exception as e:  # noqa: BLE001 - `result` raises it
            _forget_variables(e)
            self._error = e
        self.over.set()
        del self, wait  # this frame is one of the error's


def _forget_variables(error: Exception) -> None:
    """Clears the variables of the frames that `error` has passed, not its lines. They refer to the
    owner of the wait, which has the error: it would remain, with its connections, in a cycle.
    """
    passed: BaseException | None = error
    while passed is not None:
        traceback.clear_frames(passed.__traceback__)
        passed = passed.__context__
