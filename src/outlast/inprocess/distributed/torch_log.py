"""Silences torch's C++ log while this library itself breaks connections, or tries to connect.

An abort shuts down the sockets of process groups and of their store. For every operation that it
ends there, torch logs a warning with a C++ stack trace, besides raising an error in the thread
concerned. So does an attempt to connect to a server that is not up. The log says nothing there that
those errors, or the report of the fault, do not say.

torch reads `TORCH_CPP_LOG_LEVEL` only once, into a global variable that its log statements compare
with; that variable is exported.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from pathlib import Path

_FATAL = 3  # c10's levels: INFO 0, WARNING 1, ERROR 2, FATAL 3

_guard = threading.Lock()
_silencing = 0
_level_before = 0


class QuietTorchLog:
    """Silences torch's C++ log in this process from `begin` to `end`, or as a context manager.

    Both may be called repeatedly, from any thread. Several objects may overlap: the level returns
    to its value when the last one ends.
    """

    def __init__(self) -> None:
        self._active = False

    def begin(self) -> None:
        self._set(True)

    def end(self) -> None:
        self._set(False)

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def _set(self, active: bool) -> None:
        global _silencing, _level_before
        level = _level()
        with _guard:
            if level is None or active == self._active:
                return
            self._active = active
            if active and not _silencing:
                _level_before, level.value = level.value, max(level.value, _FATAL)
            _silencing += 1 if active else -1
            if not _silencing:
                level.value = _level_before


@functools.cache
def _level() -> ctypes.c_int | None:
    """The variable in torch's library, which is already loaded; `None` in a build without it."""
    import torch

    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_int.in_dll(
            ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD), "FLAGS_caffe2_log_level"
        )
    except (OSError, ValueError):
        return None
