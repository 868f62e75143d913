"""`atomic()`: a section of the function that no restart interrupts.

A restart (abort and interrupt) begins only while the function's thread is outside all atomic
sections. Once a restart is due, the thread cannot enter another section: it is interrupted at the
entry. Both sides decide under one lock, so one always comes first. The function's thread takes that
lock under a shield (see `interrupter.py`), so an interrupt can never leave it locked.
"""

from __future__ import annotations

import threading
from types import TracebackType

from outlast.errors import RankShouldRestart
from outlast.inprocess.interruption.interrupter import Interrupter


class AtomicSection:
    """The context manager behind `CallWrapper.atomic()`; reentrant, for one thread."""

    def __init__(self, interrupter: Interrupter) -> None:
        self.interrupter = interrupter
        self._changed = threading.Condition(threading.Lock())
        self._depth = 0
        self._terminating = False

    def __enter__(self) -> None:
        self.interrupter.shield()
        with self._changed:
            refused = self._terminating and not self._depth
            if not refused:
                self._depth += 1
        if refused:
            self.interrupter.unshield()
            raise RankShouldRestart("a restart has begun: atomic() is not entered")

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._depth = max(0, self._depth - 1)  # a generator may outlive its iteration
            self._changed.notify_all()
        self.interrupter.unshield()

    def begin_termination(self) -> None:
        """Waits until the thread is outside. From the start of this wait, the thread cannot enter
        again: otherwise a loop of atomic sections could delay the restart forever.
        """
        with self._changed:
            self._terminating = True
            self._changed.wait_for(lambda: self._depth == 0)

    def function_left(self) -> None:
        """Call when the function has been left. A section that it still holds, in a generator that
        lives on, does not delay the restart.
        """
        with self._changed:
            self._depth = 0
            self._changed.notify_all()

    def reset(self) -> None:
        """Starts a new iteration: `atomic()` may be entered again."""
        with self._changed:
            self._terminating = False
            self._depth = 0
