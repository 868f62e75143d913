"""What an exception of the function is: an interrupt, the echo of a fault on another rank, a
mistake that a restart does not fix; and how its user sees it, without this package's frames.
"""

from __future__ import annotations

import bdb
import dis
import logging
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from outlast.coordination.blame import ECHOES, MISTAKES
from outlast.coordination.repeated_faults import ALWAYS, AT_START
from outlast.errors import (
    FolderInUse,
    InternalError,
    OutlastError,
    RankExcluded,
    RankShouldRestart,
    RestartAbort,
    StoreError,
)
from outlast.system.error_text import chain, message
from outlast.system.frames import in_standard_library, is_installed, is_own

log = logging.getLogger("outlast.inprocess")

_AT_START = (TypeError, NameError, SyntaxError, ImportError, FolderInUse)
_RAISE = dis.opmap["RAISE_VARARGS"]


def is_consequence(error: BaseException) -> bool:
    """Whether `error`, or a cause of it, looks like a broken connection or another rank's error."""
    for seen in chain(error):
        if isinstance(seen, OutlastError) and seen.of_another_rank:
            return True
        if isinstance(seen, dist.DistNetworkError | dist.DistBackendError):
            return True
        if isinstance(seen, RuntimeError | OSError):
            text = message(seen)
            if any(echo in text for echo in ECHOES):
                return True
    return False


def is_interrupt(error: BaseException) -> bool:
    """Whether `error` is the interrupt, or was raised while handling it: user code may wrap it, or
    fail in its cleanup. Exceptions that end the process, such as SystemExit, do not count.
    """
    if isinstance(error, Exception):
        return any(isinstance(seen, RankShouldRestart) for seen in chain(error))
    return isinstance(error, RankShouldRestart)


def overtaken(error: BaseException, handled: BaseException | None) -> Exception | None:
    """The exception that was on its way out of the function, or was handled in it, when the restart
    ended it by `error`: by the interrupt, or by the end of a collective. Not one that was `handled`
    outside when the function was called, not an echo, and none that was raised because of these.

    Example: a rank fails, and destroys its process group in a `finally`. The others see a closed
    connection, and their restart interrupts the `finally`. An exception that an `except` handles
    for good looks the same to Python, so this one may be harmless.
    """
    before = set() if handled is None else {id(seen) for seen in chain(handled)}
    for seen in chain(error):
        below = seen is not error and id(seen) not in before and not _is_inner(seen)
        # The abort ends the connection to a store in which a rank waits for the others.
        of_restart = is_interrupt(seen) or is_consequence(seen) or isinstance(seen, StoreError)
        if below and isinstance(seen, Exception) and not of_restart:
            return seen
    return None


def _is_inner(error: BaseException) -> bool:
    """Whether this package or Python's library has caught it, such as the end of a connection that
    becomes a `StoreError`: the first frame of a traceback is the one that has caught it.
    """
    caught = error.__traceback__ and error.__traceback__.tb_frame
    return caught is not None and (is_own(caught) or in_standard_library(caught))


def ending_in(error: BaseException) -> BaseException:
    """The exception that ends the process or the job (KeyboardInterrupt, SystemExit, RestartAbort)
    if `error` is an interrupt raised while that exception was propagating; otherwise `error`.
    """
    if isinstance(error, RankShouldRestart):
        for seen in chain(error):
            if not isinstance(seen, Exception | RankShouldRestart | GeneratorExit):
                return seen
    return error


def permanence(error: BaseException) -> str:
    """`ALWAYS`, `AT_START`, or an empty string for an error that may not come back."""
    if isinstance(error, OutlastError) and error.permanent:
        return ALWAYS
    if is_misuse(error) or isinstance(error, bdb.BdbQuit):
        return ALWAYS
    return AT_START if isinstance(error, _AT_START) else ""


def advice(error: BaseException) -> str:
    """What the user can do about it, as a sentence to append to its message; or an empty string."""
    if isinstance(error, bdb.BdbQuit):
        return (
            ": the debugger was left, or found no terminal, as on the ranks of a launcher. To "
            "debug, run the script as one process in a terminal: python SCRIPT"
        )
    return ""


def is_mistake(error: BaseException) -> bool:
    """Whether a mistake in the user's program raises this. An `OutlastError` says so by itself."""
    return isinstance(error, MISTAKES) and not isinstance(error, OutlastError)


def is_misuse(error: BaseException) -> bool:
    """Whether it is a `ValueError` or `TypeError` from a `raise` statement of this package: a wrong
    argument (see `outlast.errors`; a failure of the world is an `OutlastError`). The same types
    from a C function that this package calls, such as a read from a closed file, are not misuse.
    """
    trace = error.__traceback__
    if type(error) not in (ValueError, TypeError) or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    package, _, module = str(trace.tb_frame.f_globals.get("__name__")).partition(".")
    if package != "outlast" or module.startswith(("chaos", "testing")):
        return False  # fault injection raises these types too, on purpose
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == _RAISE


def user_region(function: Callable[[], Any]) -> Any:
    """A frame on the user's side: the innermost one in Python while a `function` in C runs."""
    return function()


USER_REGION: CodeType = user_region.__code__


def in_function(frame: FrameType | None) -> bool:
    """Whether the user's function has called what the thread is executing."""
    while frame is not None and frame.f_code is not USER_REGION:
        frame = frame.f_back
    return frame is not None


def remove_own_frames(error: BaseException) -> None:
    """Removes this package's frames from the tracebacks of `error` and of its causes: those that
    led to the user's code, and all of them where this package raised the error on purpose. What may
    be a mistake in this package keeps its frames; so does everything while its log is at DEBUG.
    """
    if log.isEnabledFor(logging.DEBUG):
        return
    for each in chain(error):
        kept = None
        for trace in reversed(_kept(each)):
            kept = TracebackType(kept, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
        each.__traceback__ = kept


def _kept(error: BaseException) -> list[TracebackType]:
    found = []
    trace = error.__traceback__
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    on_purpose = isinstance(error, OutlastError | RestartAbort | RankExcluded) or is_misuse(error)
    if on_purpose and not isinstance(error, InternalError):
        return [each for each in found if not is_own(each.tb_frame)]
    begin = next((n for n, each in enumerate(found) if _is_users(each)), len(found))
    begins = [n for n in range(begin, len(found)) if not is_own(found[n].tb_frame)]
    return found[begins[0] :] if begins else found


def _is_users(trace: TracebackType) -> bool:
    """Whether the traceback enters the function here, or another part of the user's program."""
    frame = trace.tb_frame
    return frame.f_code is USER_REGION or not (is_own(frame) or is_installed(frame))
