"""A process of the zygote on a host of a test: in the namespaces of the host, as by `nsenter`."""

from __future__ import annotations

import ctypes
import os
import signal

_NAMESPACES = ("net", "uts", "ipc", "pid", "time", "mnt")
"""In the order in which they are entered: after the last one, /proc is that of the host."""


def enter(init: int) -> None:
    """Enters the namespaces of a process, and returns in a child: only children of this process are
    in its process namespace. This process waits for the child, stops with it, and ends as it does.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    entries = [os.open(f"/proc/{init}/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]
    for entry in entries:
        if libc.setns(entry, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(entry)
    child = os.fork()
    if child == 0:
        return
    while True:
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            break
        os.kill(os.getpid(), signal.SIGSTOP)
        os.kill(child, signal.SIGCONT)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))
