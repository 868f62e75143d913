"""Reads single keys from the terminal, and leaves the terminal as it was."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from typing import Any


class Keys:
    """A context in which a key is read when it is pressed, without Enter.

    Without a terminal as standard input, no key is ever pressed.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self._before: list[Any] = []

    def __enter__(self) -> Keys:
        with contextlib.suppress(AttributeError, ValueError, OSError, termios.error):
            descriptor = sys.stdin.fileno()
            self._before = termios.tcgetattr(descriptor)
            tty.setcbreak(descriptor)
            self._descriptor = descriptor
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)
            self._descriptor = -1

    def pressed(self, timeout_s: float) -> str:
        """Waits for a key; an empty string if none was pressed in time."""
        if self._descriptor < 0:
            time.sleep(timeout_s)
            return ""
        ready, _, _ = select.select([self._descriptor], [], [], timeout_s)
        if not ready:
            return ""
        data = os.read(self._descriptor, 64)
        if not data:  # the terminal is gone
            self._descriptor = -1
        return data.decode(errors="replace")[:1]
