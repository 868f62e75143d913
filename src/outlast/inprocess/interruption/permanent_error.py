"""Whether a restart would end with the same exception again, and whose mistake that is."""

from __future__ import annotations

import bdb
import dis

from outlast.coordination.decisions.repeated_faults import ALWAYS, AT_START
from outlast.errors import FolderInUse, OutlastError

_AT_START = (TypeError, NameError, SyntaxError, ImportError, FolderInUse)
_MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    StopIteration,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What a mistake in a program raises. A fault of the machine is an `OSError` or, in torch, a plain
`RuntimeError`.
"""
_RAISE = dis.opmap["RAISE_VARARGS"]


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
    """Whether a mistake in the user's program raises such an exception. `OutlastError` says by
    itself whether it is permanent.
    """
    return isinstance(error, _MISTAKES) and not isinstance(error, OutlastError)


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
