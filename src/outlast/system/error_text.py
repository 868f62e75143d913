"""An exception, or the end of a process, as text; tracebacks that keep no objects alive."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Iterator

_MESSAGE_CHARS = 2_000
_TRACEBACK_CHARS = 20_000


def describe(error: BaseException) -> str:
    """Type and message, as at the end of a traceback: `ValueError: ...`, truncated if very long."""
    text = _with_type(error, message(error))
    return text if len(text) <= _MESSAGE_CHARS else text[:_MESSAGE_CHARS] + " ..."


def first_line(error: BaseException, *, with_type: bool = False) -> str:
    """The first line of the message: torch appends a C++ stack to its messages."""
    line = message(error).partition("\n")[0]
    return _with_type(error, line) if with_type else line


def traceback_text(error: BaseException) -> str:
    """The traceback; only its end if it is very long, because it is sent to other ranks."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return printable(text[-_TRACEBACK_CHARS:])


def printable(text: str) -> str:
    """Escapes what cannot be encoded, and control characters, which would erase terminal lines."""
    text = text.replace("\r\n", "\n").encode(errors="backslashreplace").decode()
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", lambda found: rf"\x{ord(found[0]):02x}", text)


def message(error: BaseException) -> str:
    """The message, even of an exception that fails to produce one."""
    try:
        return printable(str(error)).strip()
    except Exception:  # noqa: BLE001 - a user's __str__ must not hide the user's error
        return "(its message cannot be made)"


def _with_type(error: BaseException, text: str) -> str:
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def signal_name(number: int) -> str:
    """`SIGKILL`, `SIGRTMIN+3`, or `signal 32` where the system has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        if signal.SIGRTMIN < number < signal.SIGRTMAX:
            return f"SIGRTMIN+{number - signal.SIGRTMIN}"
        return f"signal {number}"


def exit_text(code: int) -> str:
    """`exited with code 3`, or `was killed by SIGKILL` for a code below 0."""
    return f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def exit_summary(code: int) -> str:
    """Like `exit_text`, in two or three words: `exit code 3`, `killed by SIGKILL`."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes, contexts and members, each once: `raise e from e` is a cycle."""
    met: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        seen = left.pop()
        if seen is None or id(seen) in met:
            continue
        met.add(id(seen))
        yield seen
        members = getattr(seen, "exceptions", ()) if hasattr(seen, "subgroup") else ()
        left += [*reversed(members), seen.__context__, seen.__cause__]


def release_frames(error: BaseException) -> None:
    """Clears local variables in the tracebacks: models and buffers, which a restart recreates."""
    for seen in chain(error):
        traceback.clear_frames(seen.__traceback__)


def drop_tracebacks(error: BaseException) -> None:
    """Removes the tracebacks of `error`. A frame that is still running cannot be cleared."""
    for seen in chain(error):
        seen.__traceback__ = None
