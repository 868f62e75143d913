"""A background process: a low-priority program beside this one that is never left behind.

    process = start_process("outlast.async_checkpoint.some_main", arguments=["--flag"])
    process.channel.send(b"...")            # the other side: settle().receive()
    process.close(timeout=5.0)

It is a new program (exec) and not a fork of this one: it has none of the CUDA state, gloo state,
threads or locks of this process. It leads its own session, so that Ctrl-C or a signal for the
training process group does not reach it. It ends by itself when this process is gone: it watches
this process, or the end of the channel.

The caller of `start_process` calls `close`, which reaps the process and closes descriptors.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence

from outlast.system.channel import Channel
from outlast.system.fork import outlive_signals_of_job, signals_of_job_blocked
from outlast.system.processes import (
    UNKNOWN_EXIT,
    end_with_parent,
    lower_priority,
    readable,
    reap,
    send_signal,
)


class BackgroundProcess:
    """This side of a background process, for any thread. `pid` is also the id of its session;
    `pidfd` is readable once the process has ended, and -1 after `close`.
    """

    def __init__(self, pid: int, channel: Channel) -> None:
        self.pid, self.channel = pid, channel
        self.pidfd = os.pidfd_open(pid)  # not reaped yet, so the PID is still its own
        self._exit_code: int | None = None
        self._reaping = threading.Lock()
        self._release = weakref.finalize(self, _release, self.pidfd, channel)

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; `None` while it lives. Reaps it."""
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Waits for its end: the exit code, as `reap` has it, or `None` on timeout."""
        if self._exit_code is None and readable(self.pidfd, timeout=timeout):
            with self._reaping:  # the code can be taken once
                if self._exit_code is None:
                    self._exit_code = reap(self.pidfd)
        return self._exit_code

    def kill(self) -> None:
        with self._reaping:
            if self._exit_code is None:
                send_signal(self.pidfd, signal.SIGKILL)

    def close(self, timeout: float = 0.0) -> int:
        """Closes the channel, waits `timeout` seconds for the process to end by itself, kills it if
        it does not, and reaps it. Returns its exit code, also a second time.
        """
        self.channel.close()
        if self.wait(timeout) is None:
            self.kill()
            self.wait()
        assert self._exit_code is not None
        self._release()
        self.pidfd = -1
        return self._exit_code


def start_process(module: str, *, arguments: Sequence[str] = ()) -> BackgroundProcess:
    """Starts `python -m module`, whose first call must be `settle()`; an `OSError` if it cannot."""
    ours, theirs = Channel.pair()
    descriptor = theirs.fileno()
    command = [sys.executable, "-m", module, str(descriptor), str(os.getpid()), *arguments]
    try:
        with signals_of_job_blocked():
            popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[descriptor], start_new_session=True
            )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    # From here on we reap it ourselves: by its pidfd, from any thread, and without the warning that
    # Popen gives when it is collected before the process has ended.
    popen.returncode = UNKNOWN_EXIT
    return BackgroundProcess(popen.pid, ours)


def settle(*, nice: int = 10, ends_with_parent: bool = True) -> Channel:
    """Prepares this background process, in its first call; returns the channel to its parent.

    Lowers its priorities for CPU and disk, ignores Ctrl-C, outlives the signals of a scheduler
    (`outlive_signals_of_job`), and removes its two arguments from `sys.argv`. Call it before any
    thread is started: a priority belongs to a thread.

    Args:
        nice: its niceness, 0 to 19; a higher one that it already has stays.
        ends_with_parent: whether it ends at once when the process that started it is gone.
            Otherwise it gets an `EOFError` from the channel, and takes the time it needs; a forked
            child of the parent may keep the channel open longer.
    """
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    del sys.argv[1:3]
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outlive_signals_of_job(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    lower_priority(nice, own_session=True)
    if ends_with_parent:
        end_with_parent(parent)
    return Channel(socket.socket(fileno=descriptor))


def _release(pidfd: int, channel: Channel) -> None:
    channel.close()
    with contextlib.suppress(ChildProcessError):  # it was never closed: reaped if it has ended
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    os.close(pidfd)
