"""A process that SIGKILL does not end, as one that waits in the kernel for a broken device.

    with unkillable(pid):
        os.kill(pid, signal.SIGKILL)     # it runs no code any more, has its files, and stays
        ...

This thread traces it, and it stops at its exit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

import pytest

_SEIZE, _DETACH, _TRACE_EXIT = 0x4206, 17, 0x40
_ALL = 0x40000000  # `__WALL`: also one that is no child of this process


@contextlib.contextmanager
def unkillable(pid: int) -> Iterator[None]:
    """At the end of the block, it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    if libc.ptrace(_SEIZE, pid, 0, _TRACE_EXIT):
        pytest.skip(f"no process can be traced here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, _ALL)  # for its stop
        libc.ptrace(_DETACH, pid, 0, 0)
