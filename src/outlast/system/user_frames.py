"""The user's part of a stack or traceback: without the frames of this package."""

from __future__ import annotations

import functools
import os
import sysconfig
import traceback
from collections.abc import Collection, Iterator
from types import FrameType

from outlast.system.error_text import printable

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


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
    return file.startswith((*_standard_library(), "<frozen ")) and not installed


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
    return file.startswith((*_standard_library(), "<frozen "))


@functools.cache
def _standard_library() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})


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
