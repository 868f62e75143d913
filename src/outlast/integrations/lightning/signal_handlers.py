"""Keeps a job's signal handlers while Lightning's signal connector is active.

After `on_fit_start`, Lightning puts handlers of its own in front of those that it finds. The one
for SIGTERM broadcasts to the other ranks from within the signal handler, in the middle of any step:
the other ranks are in another collective, and the job hangs or fails. On Slurm, the one for the
requeue signal saves there too.
"""

from __future__ import annotations

import signal
import threading
from typing import Any


class SignalHandlers:
    """The handlers of this process at one moment, to be put back."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}

    def remember(self) -> None:
        """Remembers the present handlers."""
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def put_back(self) -> None:
        """Installs the remembered handlers where others are now."""
        if threading.current_thread() is not threading.main_thread():
            return  # Lightning installs handlers in the main thread only
        for number, handler in self._handlers.items():
            # `None`: not installed from Python, and so not replaced by Lightning either.
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
