"""Sees a process die before it is dead.

The pidfd of a process tells when all of it is over, its memory given back to the system too: that
takes 100 ms a GiB or so. Its sockets are closed only then. But SIGKILL, a crash or `_exit` end all
threads at once, and a thread that does not happen to be the last holder of the memory is gone
within a millisecond. So threads of the process are watched, each by a pidfd of its own
(PIDFD_THREAD, Linux 6.9; older systems wait for the process).

A thread may also end in good order. Then the process goes on; which of the two it is, the kernel
says: the main thread of a dying process is exiting, or has SIGKILL pending and never comes back to
its own code. That is all that the others need to go on without it.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

__all__ = ["is_dying", "open_thread"]

_PIDFD_OPEN = 434
_PIDFD_THREAD = os.O_EXCL
_PF_EXITING = 0x4


def open_thread(tid: int) -> int | None:
    """A descriptor that is readable when the thread is over; `None` where there is none."""
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_OPEN, tid, _PIDFD_THREAD)
    return None if descriptor < 0 else int(descriptor)


def is_dying(pid: int) -> bool:
    """Whether the process runs no code of its own any more."""
    try:
        # Fields after the name, which is in parentheses and may hold anything: state, ..., flags.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] in "ZX" or int(fields[6]) & _PF_EXITING:
            return True
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    killed = 1 << (signal.SIGKILL - 1)
    return any(
        int(line.partition(":")[2], 16) & killed
        for line in status.splitlines()
        if line.startswith(("SigPnd:", "ShdPnd:"))
    )
