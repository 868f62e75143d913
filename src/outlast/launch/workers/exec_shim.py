"""Becomes a worker, after tying its lifetime to the launcher's; run as a program, by path.

    python -I -S exec_shim.py LAUNCHER_PID COMMAND...

It asks the kernel for SIGKILL when the launcher dies (PR_SET_PDEATHSIG, which survives `exec`),
and then becomes COMMAND in the same process. A `preexec_fn` would do the same without a second
interpreter start (10 ms), but it runs Python in a fork of a process with C++ threads (the store's)
and whatever locks they held, and `subprocess` could not use vfork.

The signal is tied to the *thread* that started the process. The launcher starts all workers in its
main thread, which lives as long as the launcher.

Nothing of outlast is imported here, to keep the start short.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_FOUND, NOT_RUNNABLE = 127, 126  # as shells do


def command() -> list[str]:
    """What stands before the command line of a process that is to die with this one."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid())]


def main(arguments: list[str]) -> None:
    """Become `arguments[1:]`, a child of the process `arguments[0]`."""
    launcher, command = int(arguments[0]), arguments[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The launcher may have died before the request: then the signal will never be sent.
    if os.getppid() != launcher:
        os._exit(NOT_RUNNABLE)
    try:
        os.execvp(command[0], command)
    except OSError as e:
        sys.stderr.write(f"outlast: cannot run {command[0]!r}: {e.strerror}\n")
        raise SystemExit(NOT_FOUND if isinstance(e, FileNotFoundError) else NOT_RUNNABLE) from None


if __name__ == "__main__":
    main(sys.argv[1:])
