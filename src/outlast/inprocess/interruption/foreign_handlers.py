"""Exceptions of signal handlers that are not this package's: kept out of its own code.

Python calls the handler of a signal in the main thread, between any two bytecodes, so what it
raises may end a restart half-way: torch's handler of SIGCHLD when a worker of a data loader has
died, a user's alarm. To block the signals does not help: the kernel delivers them to another
thread, and Python still calls the handler in this one. So while this package's code runs, each
handler is called through a `_Guard`, at once, but what it raises there is kept. An exception that
ends the process (`SystemExit`, `KeyboardInterrupt`) is not: the rank leaves, as it would elsewhere.

Which code runs is decided by the frame that Python passes to the handler, not by a flag, so there
is no moment between two states. In the user's code nothing changes: the function finds its own
handlers (`released`), and a guard that it has taken for a previous handler passes all on.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress
from types import FrameType
from typing import Any

from outlast.inprocess.interruption.error_kinds import in_function
from outlast.system.frames import in_own_code

_NUMBERS = tuple(map(int, signal.valid_signals()))


class ForeignHandlers:
    """The handlers of one call; the caller empties `kept`, the signals and exceptions kept."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, Exception]] = []
        self.held = False
        self._guards: dict[int, _Guard] = {}
        self._seen: list[Any] = []  # the handlers when a look has found nothing to guard

    def hold(self) -> None:
        """Guards Python's handlers, new ones too, in the main thread: no other runs handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        self.held = True
        # `_signal` is C; `signal` makes enums, in tens of thousands of bytecodes. This runs at each
        # transition, and an interrupt that waits for its end is tried again at each bytecode.
        handlers: list[Any] = list(map(_signal.getsignal, _NUMBERS))
        if handlers == self._seen:
            return
        pairs, seen = zip(_NUMBERS, handlers, strict=True), handlers
        for number, handler in compress(pairs, map(callable, handlers)):
            if handler is signal.default_int_handler:
                continue
            if not str(getattr(handler, "__module__", "")).startswith("outlast."):
                guard, seen = _Guard(handler, self), []
                self._guards[number] = guard
                signal.signal(number, guard)
        self._seen = seen  # at the end: an interrupt may come before

    def release(self) -> None:
        self.held, self._seen = False, []
        for number, guard in self._guards.items():
            installed: Any = signal.getsignal(number)
            if installed is guard:
                signal.signal(number, guard.handler)
        self._guards.clear()

    @contextmanager
    def released(self) -> Iterator[None]:
        """For the user's function: it sees its handlers, and gets what they raise."""
        self.release()
        try:
            yield
        finally:
            self.hold()


class _Guard:
    def __init__(self, handler: Callable[[int, FrameType | None], Any], of: ForeignHandlers):
        self.handler, self._of = handler, of

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.handler(number, frame)
        except Exception as error:
            if not self._of.held or not in_own_code(frame) or in_function(frame):
                raise
            self._of.kept.append((number, error))
