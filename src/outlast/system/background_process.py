"""A background process: another program beside this one, of low priority, never left behind.

    process = start_process("outlast.async_checkpoint.some_main", arguments=["--flag"])
    process.channel.send(b"...")            # the other side: settle().receive()
    process.close(timeout=5.0)

It is a new program (exec) and no fork of this one: nothing of CUDA's, of gloo's, of the threads or
the locks of this process is in it. It leads a session of its own, so that a Ctrl-C or a signal
for the process group of the training does not reach it. It ends when this process is gone, by
itself: it watches this process, or the end of the channel.

Whoever starts one closes it; so it is always reaped, and no descriptor stays.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import psutil

from outlast.system.channel import Channel

__all__ = [
    "UNKNOWN_EXIT",
    "BackgroundProcess",
    "end_with",
    "lower_priority",
    "reap",
    "settle",
    "start_process",
]

UNKNOWN_EXIT = 255
"""The exit code of a process whose real one somebody else has taken: this program ignores SIGCHLD,
or reaps every child it finds. It is not 0, for nobody knows that all was well.
"""


class BackgroundProcess:
    """This side of a background process. Any thread may use it.

    Attributes:
        pid: its process id; the number of its session too.
        channel: to it.
        pidfd: readable once it has ended; -1 after `close`.
    """

    def __init__(self, pid: int, channel: Channel) -> None:
        self.pid = pid
        self.channel = channel
        self.pidfd = os.pidfd_open(pid)  # it is not reaped: the number is still its own
        self._exit_code: int | None = None
        self._reaping = threading.Lock()
        self._let_go = weakref.finalize(self, _let_go, self.pidfd, channel)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; `None` while it lives. Reaps it."""
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Waits for its end.

        Args:
            timeout: in seconds; `None` waits for as long as it takes.

        Returns:
            Its exit code, negative for a signal, `UNKNOWN_EXIT` if somebody else took it; `None`
            when the time is over.
        """
        if self._exit_code is None and _readable(self.pidfd, timeout):
            with self._reaping:  # the code can be taken once
                if self._exit_code is None:
                    self._exit_code = reap(self.pidfd)
        return self._exit_code

    def kill(self) -> None:
        """Sends SIGKILL, if it has not ended. Does not wait."""
        with self._reaping:
            if self._exit_code is None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self, timeout: float = 0.0) -> int:
        """Closes the channel, gives the process time to end, kills it if it has not, reaps it.

        Args:
            timeout: in seconds.

        Returns:
            Its exit code. A second call returns the same, and does nothing.
        """
        self.channel.close()
        if self.wait(timeout) is None:
            self.kill()
            self.wait()
        assert self._exit_code is not None
        self._let_go()
        self.pidfd = -1
        return self._exit_code


def start_process(module: str, *, arguments: Sequence[str] = ()) -> BackgroundProcess:
    """Starts `python -m module`, whose first call must be `settle()`.

    Args:
        module: what the new process runs as its `__main__`.
        arguments: its `sys.argv[1:]`, once it has settled.

    Raises:
        OSError: if the system has no room for another process.
    """
    ours, theirs = Channel.pair()
    descriptor = theirs.fileno()
    command = [sys.executable, "-m", module, str(descriptor), str(os.getpid()), *arguments]
    try:
        popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[descriptor], start_new_session=True
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    # From here on it is ours to reap: by its pidfd, from any thread, and without the warning that
    # Popen has for a process which is to outlive its parent.
    popen.returncode = UNKNOWN_EXIT
    return BackgroundProcess(popen.pid, ours)


def settle(*, nice: int = 10, idle_io: bool = False, ends_with_parent: bool = True) -> Channel:
    """For the process that was started, first of all: makes it a quiet one.

    Lowers its priorities for CPU and disk, ignores Ctrl-C, and takes its two arguments off
    `sys.argv`. To be called before any thread is started, since priorities are a thread's.

    Args:
        nice: its niceness, 0 to 19; a higher one that it has already stays.
        idle_io: whether its disk access waits for everybody else's, possibly for ever; otherwise
            it has the lowest priority of those that get their share.
        ends_with_parent: whether it ends, in the middle of anything, when the process that
            started it is gone. Otherwise it finds that out by the `EOFError` of the channel, and
            takes the time it needs; a fork of the parent's may hold the channel open longer.

    Returns:
        The channel to the process that started it.
    """
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    del sys.argv[1:3]
    os.set_inheritable(descriptor, False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    lower_priority(nice, idle_io=idle_io, own_session=True)
    if ends_with_parent:
        end_with(parent)
    return Channel(socket.socket(fileno=descriptor))


def end_with(parent: int) -> None:
    """Has this process end at once when its parent does.

    Not by PR_SET_PDEATHSIG: that signal comes when the *thread* that started this process ends.

    Args:
        parent: its process id, known from before this process began.
    """
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    # If it is our parent now, it was when the pidfd was made: then the number cannot have passed
    # on to a stranger in between.
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        _readable(pidfd, None)
        os._exit(1)

    threading.Thread(target=watch, name="outlast-parent", daemon=True).start()


def lower_priority(nice: int, *, idle_io: bool = False, own_session: bool) -> None:
    """Puts this process, of one thread so far, behind others.

    Args:
        nice: its niceness, 0 to 19; a higher one that it has already stays.
        idle_io: whether its disk access waits for everybody else's.
        own_session: whether nothing but this process is in its session.
    """
    own = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, max(own, min(nice, 19)))
    if own_session:
        # Where the kernel groups processes by session, niceness counts within a session only;
        # with one process in it, the group must be made nice as a whole.
        with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError):
            Path("/proc/self/autogroup").write_text(str(nice))
    kind, level = (psutil.IOPRIO_CLASS_IDLE, 0) if idle_io else (psutil.IOPRIO_CLASS_BE, 7)
    with contextlib.suppress(psutil.AccessDenied):  # a container may forbid it
        psutil.Process().ionice(kind, level)


def reap(pidfd: int) -> int:
    """The exit code of a child that has ended, negative for a signal; `UNKNOWN_EXIT` if it was
    taken already. By its pidfd, so that it is never a stranger's who has got its number.
    """
    try:
        found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    except ChildProcessError:
        return UNKNOWN_EXIT
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _readable(descriptor: int, timeout: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout is None else max(timeout, 0.0) * 1000))


def _let_go(pidfd: int, channel: Channel) -> None:
    channel.close()
    with contextlib.suppress(ChildProcessError):  # nobody has closed it: reaped if it has ended
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    os.close(pidfd)
