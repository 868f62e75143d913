"""Which exceptions say something of the host on which they are raised."""

from __future__ import annotations

import builtins

from outlast import errors
from outlast.events.restart_causes import split_exception

# Messages of gloo (pair.cc), NCCL (remote process exited) and torch's TCP store on either side of a
# broken connection; and of nccl2, whose exceptions are plain `RuntimeError`, of a communicator that
# is aborted or waits for another rank.
ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "remote process exited",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "NCCL Last Error: ",
    "NCCL operation timed out",
    "Connection was likely closed",
    "Software caused connection abort",
)
# What a mistake in a program raises. A fault of the machine is an `OSError` or, in torch, a plain
# `RuntimeError`.
MISTAKES = (
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
_OF_THE_DATA = (errors.NonFinite, errors.ReplicasDiffer)
"""Found on all ranks at once: they name no host."""


def may_be_of_host(error: str) -> bool:
    """Whether a fault of the host may have raised it; `error` is the last line of a traceback."""
    if any(echo in error for echo in ECHOES):
        return False
    found = split_exception(error)
    name = found[1].rpartition(".")[2] if found else ""
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    return not (isinstance(kind, type) and issubclass(kind, (*MISTAKES, *_OF_THE_DATA)))
