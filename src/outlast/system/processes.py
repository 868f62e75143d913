"""Other processes: open, watch, signal and reap them by pidfd, and wait for these and for other
descriptors; lower this one's priority.

`is_dying` and `open_thread` detect a dying process before it has ended. The pidfd of a process
becomes readable only when all of the process is gone, which includes giving its memory back to the
system (about 100 ms per GiB); its sockets are closed only then. But SIGKILL, a crash or `_exit` end
all threads at once, and a thread that does not happen to be the last holder of the memory is gone
within a millisecond. So threads of the process are watched, each by a pidfd of its own
(PIDFD_THREAD, Linux 6.9; on older systems only the process itself is watched).

A thread may also return normally while the process continues. The kernel distinguishes the two: the
main thread of a dying process is exiting, or has SIGKILL pending, and never runs its own code
again. That is all that its peers need to know to continue without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from pathlib import Path

import psutil

from outlast.system.parallel import start_thread

UNKNOWN_EXIT = 255
# For a process whose real exit code is lost: this program ignores SIGCHLD, or another part of it
# reaps every child. It is not 0, because success was not seen.

_PIDFD_OPEN = 434
_PIDFD_THREAD = os.O_EXCL
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4


def readable(*descriptors: int, timeout: float | None = None) -> list[int]:
    """Waits up to `timeout` seconds; returns the descriptors that are readable, or closed."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    found = poll.poll(None if timeout is None else max(timeout, 0.0) * 1000)
    return [descriptor for descriptor, _ in found]


def open_process(pid: int) -> int | None:
    """A pidfd, readable once the process has ended; `None` if it has ended already, or for the
    number 0: a process outside this one's container, which cannot be watched.
    """
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except ProcessLookupError:
        return None


def open_parent(parent: int) -> int | None:
    """A pidfd of the parent, known from before this process began; `None` if it has ended."""
    pidfd = open_process(parent)
    # If it is the parent now, it was the parent when the pidfd was opened: the number cannot have
    # passed to another process in between.
    if pidfd is not None and os.getppid() != parent:
        os.close(pidfd)
        return None
    return pidfd


def open_thread(tid: int) -> int | None:
    """A descriptor, readable once the thread has ended; `None` where the system has none."""
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_OPEN, tid, _PIDFD_THREAD)
    return None if descriptor < 0 else int(descriptor)


def status_fields(pid: int, place: str = "") -> list[str]:
    """The status of a process, or of its thread at `place`: state, parent, ..., all but the name,
    which is in parentheses and may hold anything; and the CPU time in ticks, `[11:13]`. An
    `OSError` if it is gone.
    """
    return Path(f"/proc/{pid}{place}/stat").read_text().rpartition(")")[2].split()


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped, by a signal or by a debugger."""
    try:
        return status_fields(pid)[0] in "Tt"
    except OSError:
        return False  # it has ended


def is_dying(pid: int) -> bool:
    """Whether the process is exiting and will not run its own code again."""
    try:
        fields = status_fields(pid)  # with the flags
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


def send_signal(pidfd: int, number: int) -> None:
    """Sends a signal, unless the process has ended. Does not wait."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def reap(pidfd: int) -> int:
    """Waits for the end of a child, and takes its exit code, negative for a signal; `UNKNOWN_EXIT`
    if it was taken already. By pidfd: it is never that of another process with the same number.
    """
    try:
        found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    except ChildProcessError:
        return UNKNOWN_EXIT
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def become_subreaper(on: bool = True) -> None:
    """Makes orphans of this process's children its own children from now on (or no longer)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_with_parent(parent: int) -> None:
    """Makes this process end at once when its parent, known from before this process began, ends.
    Not by PR_SET_PDEATHSIG: that comes when the *thread* that started it ends.
    """
    pidfd = open_parent(parent)
    if pidfd is None:
        os._exit(1)

    def watch() -> None:
        readable(pidfd)
        os._exit(1)

    start_thread("outlast-parent", watch)


def lower_priority(nice: int, *, own_session: bool) -> None:
    """Lowers the priority of this process, which has one thread so far, for CPU and disk, also for
    its group (`own_session`). Its disk access never has to wait forever.
    """
    own = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, max(own, min(nice, 19)))
    if own_session:
        # Where the kernel groups processes by session, niceness counts within a session only;
        # with one process in it, the group must be made nice as a whole.
        with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError):
            Path("/proc/self/autogroup").write_text(str(nice))
    with contextlib.suppress(psutil.AccessDenied):  # a container may forbid it
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)
