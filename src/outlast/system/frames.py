"""Frames of Python: what another thread executes, and the user's part of a stack or traceback.

Up to Python 3.11, `sys._current_frames()` can stop the process for good: it allocates while it
holds the lock of all thread states, an allocation may start a garbage collection, and a finalizer
may release the GIL; a thread that begins or ends takes the GIL then, and waits for that lock
(CPython issue 106883). From 3.12 on a collection starts only between two bytecodes.
"""

from __future__ import annotations

import gc
import operator
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

from outlast.system.error_text import printable

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep  # `sysconfig` would import a large module
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


def user_traceback(error: BaseException, max_chars: int) -> str:
    """The traceback without this package's frames; only its end if it is very long."""
    found = traceback.TracebackException.from_exception(error)
    _remove_own(found, set())
    return printable("".join(found.format())[-max_chars:])


def user_place(error: BaseException) -> str:
    """The user's innermost line in the traceback, else one outside this package: `a.py:4 in f`."""
    frames = [
        (frame.f_code.co_filename, line or 0, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return place_in_user_code(frames[::-1])


def user_place_of(frame: FrameType | None) -> str:
    """The innermost line of the user on a stack."""
    return place_in_user_code(
        [(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in _outwards(frame)]
    )


def is_own(frame: FrameType, but: Collection[str] = ()) -> bool:
    """Whether it is a frame of this package, `but` not of these folders."""
    file = frame.f_code.co_filename
    return file.startswith(_OWN) and file.removeprefix(_OWN).partition(os.sep)[0] not in but


def in_standard_library(frame: FrameType) -> bool:
    """Whether it is a frame of Python's own library."""
    file = frame.f_code.co_filename
    if file == "<string>":  # the constructor of a named tuple, as asyncio's selectors make them
        return str(frame.f_globals.get("__name__")).startswith("namedtuple_")
    installed = "site-packages" in file or "dist-packages" in file
    return file.startswith((_LIBRARY, "<frozen ")) and not installed


def in_own_code(frame: FrameType | None) -> bool:
    """Whether this package, and not the user, has called what the thread is executing."""
    for each in _outwards(frame):
        if is_own(each):
            return True
        if not is_installed(each):
            return False
    return False


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def place_in_user_code(frames: list[tuple[str, int, str]]) -> str:
    """The place of the innermost frame; `frames` begins with it."""
    others = [frame for frame in frames if not frame[0].startswith(_OWN)]
    users = [frame for frame in others if not _is_installed(frame[0])]
    for file, line, function in (*users, *others):
        return printable(f"{os.path.basename(file)}:{line} in {function}").replace("\n", "\\n")
    return ""


def is_installed(frame: FrameType) -> bool:
    """Whether it is a frame of Python or of an installed package."""
    return _is_installed(frame.f_code.co_filename)


def _is_installed(file: str) -> bool:
    folders = file.split(os.sep)
    if "site-packages" in folders or "dist-packages" in folders:
        return True
    return file.startswith((_LIBRARY, "<frozen "))


def _remove_own(found: traceback.TracebackException, seen: set[int]) -> None:
    if id(found) in seen:
        return
    seen.add(id(found))
    users = [frame for frame in found.stack if not frame.filename.startswith(_OWN)]
    if users:
        found.stack = traceback.StackSummary.from_list(users)
    for other in (found.__cause__, found.__context__):
        if other is not None:
            _remove_own(other, seen)
