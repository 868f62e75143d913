"""What another thread executes, and which exception it handles.

Up to Python 3.11, `sys._current_frames()` can stop the process for good: it allocates while it
holds the lock of all thread states, an allocation may start a garbage collection, and a finalizer
may release the GIL; a thread that begins or ends takes the GIL then, and waits for that lock
(CPython issue 106883). From 3.12 on a collection starts only between two bytecodes.
"""

from __future__ import annotations

import gc
import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_COLLECTS_IN_ALLOCATIONS = sys.version_info < (3, 12)
_call = operator.methodcaller("__call__")


def frame_of(ident: int) -> FrameType | None:
    """The innermost Python frame of the thread; `None` if it has ended."""
    found: FrameType | None = _without_collection(sys._current_frames).get(ident)
    return found


def exception_of(ident: int) -> BaseException | None:
    """What the thread is handling: the exception of its innermost `except`, `finally` or `with`."""
    found = _without_collection(sys._current_exceptions).get(ident)
    error: BaseException | None = found[1] if isinstance(found, tuple) else found  # up to 3.11
    return error


def _without_collection(look: Callable[[], Any]) -> Any:
    if not (_COLLECTS_IN_ALLOCATIONS and gc.isenabled()):
        return look()
    # All four are called by `list` in C, without a bytecode between them at which another thread
    # could run: neither does the program see that the collector is off, nor is it turned on again
    # after the program has turned it off.
    enabled, _, found, _ = list(map(_call, (gc.isenabled, gc.disable, look, gc.enable)))
    if not enabled:  # turned off since the first line
        gc.disable()
    return found
