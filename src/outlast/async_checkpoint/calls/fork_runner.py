"""A process for each call, by fork: any function, and the memory as it is at this moment.

The child has a copy-on-write copy of everything, so closures work and nothing is pickled. What a
fork cannot have: CUDA (move tensors to the CPU first), the parent's threads, its network
connections. Those are taken away from the child: two processes on one connection are of no use,
and a copy in a child would keep a connection, or the port of a store, open after the parent has
closed it, which its peers would wait for.

The child reports in a file in memory, not in a pipe: it never waits for a reader, a child of its
own that lives on does not hold up the end, and what it wrote is there when its pidfd says that it
has ended. It leaves by `os._exit`: the parent's exit handlers are not its own to run.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import stat
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from outlast.async_checkpoint.calls.runner_protocol import (
    Outcome,
    await_copies,
    ended_badly,
    run_here,
)
from outlast.system.background_process import end_with, lower_priority, reap

__all__ = ["ForkRunner"]


class ForkRunner:
    """A `Runner` that forks for every call; so calls run side by side.

    Args:
        nice: niceness of the children, 0 to 19.
    """

    def __init__(self, nice: int = 10) -> None:
        self._nice = nice
        self._calls: dict[int, _Child] = {}

    def start(
        self, index: int, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        await_copies()
        self._calls[index] = _fork(lambda: run_here(fn, args, kwargs), self._nice)

    def descriptors(self) -> list[int]:
        return [child.pidfd for child in self._calls.values()]

    def collect(self) -> list[tuple[int, Outcome]]:
        poll = select.poll()
        for child in self._calls.values():
            poll.register(child.pidfd, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(0)}
        over = [index for index, child in self._calls.items() if child.pidfd in ended]
        return [(index, self._calls.pop(index).take()) for index in over]

    def kill(self) -> None:
        for child in self._calls.values():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        while self._calls:
            _, child = self._calls.popitem()
            child.take()


class _Child:
    """The parent's side of one call."""

    def __init__(self, pidfd: int, report: int) -> None:
        self.pidfd = pidfd
        self._report = report

    def take(self) -> Outcome:
        """Waits for its end; gives everything back."""
        code = reap(self.pidfd)
        data = os.pread(self._report, os.fstat(self._report).st_size, 0)
        os.close(self._report)
        os.close(self.pidfd)
        try:
            outcome = Outcome.decode(data)
        except ValueError:  # nothing, or half of it
            return ended_badly(code)
        # Its report is the last that it does. Its code says the same, unless somebody else took
        # it; a signal in the last moment counts as one in the middle of the call.
        return ended_badly(code) if code < 0 else outcome


def _fork(body: Callable[[], Outcome], nice: int) -> _Child:
    report = os.memfd_create("outlast-report", os.MFD_CLOEXEC)
    parent = os.getpid()
    _flush()  # or the child would write what is in the buffers once more
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of forks with threads. The child takes no lock but those that
            # Python itself makes anew after a fork, and whatever the function takes.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except BaseException:
        os.close(report)
        raise
    if pid == 0:
        _run_child(body, parent, report, nice)
    try:
        return _Child(os.pidfd_open(pid), report)
    except OSError:  # no room for it, or gone already, in a program that ignores SIGCHLD
        os.close(report)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise


def _run_child(body: Callable[[], Outcome], parent: int, report: int, nice: int) -> NoReturn:
    """Never returns: the parent's stack below is not ours to unwind."""
    code = 1
    try:
        _detach()
        lower_priority(nice, own_session=False)
        end_with(parent)
        outcome = body()
        _flush()
        os.write(report, outcome.encode())
        code = 0
    except BaseException:  # noqa: BLE001 - the last frame of this process
        with contextlib.suppress(BaseException):
            sys.excepthook(*sys.exc_info())
            _flush()
    finally:
        os._exit(code)


def _detach() -> None:
    """Leaves behind what is the parent's alone."""
    gc.freeze()  # a collection would write to, and so copy, the pages shared with the parent
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _leave_connections()
    torch = sys.modules.get("torch")
    if torch is not None:
        # The threads of OpenMP's pool are not here. With one thread nobody asks for them; with
        # more, the first large operation would wait for them for ever.
        torch.set_num_threads(1)


def _leave_connections() -> None:
    """Replaces every TCP socket but the standard streams by the null device. The numbers stay
    taken, so that nothing new gets the number of a connection that the parent's objects hold.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for entry in os.listdir("/proc/self/fd"):
        descriptor = int(entry)
        try:
            if descriptor <= 2 or not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                network = copy.family in (socket.AF_INET, socket.AF_INET6)
                stream = copy.type == socket.SOCK_STREAM
        except OSError:
            continue  # the descriptor that listed the folder
        if network and stream:
            os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # There may be none, or a closed one, or a broken pipe behind it.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()
