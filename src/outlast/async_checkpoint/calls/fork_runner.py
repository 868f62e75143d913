"""Forks a process for each call: any function, and memory as it is at that moment.

The child has a copy-on-write copy of everything, so closures work and nothing is pickled. It cannot
use CUDA (move tensors to the CPU first), and has neither the parent's threads nor its network
connections. Those are replaced in the child: two processes cannot use one connection, and a copy in
the child would keep a connection, or the port of a store, open after the parent has closed it,
while peers wait for it to close.

The child reports in an in-memory file, not a pipe: it never waits for a reader, a surviving
grandchild does not delay the end, and the report is complete when the pidfd signals the end of the
child. It exits by `os._exit`, so that it does not run the parent's exit handlers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from outlast.async_checkpoint.calls.runner_protocol import (
    Outcome,
    await_copies,
    ended_badly,
    run_here,
)
from outlast.system.fork import flush_streams, fork_detached
from outlast.system.processes import end_with_parent, lower_priority, reap, send_signal
from outlast.system.sockets import replace_tcp_sockets
from outlast.system.waiting import readable


class ForkRunner:
    """A `Runner` that forks for every call, so calls run in parallel."""

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
        ended = readable(*self.descriptors(), timeout=0)
        over = [index for index, child in self._calls.items() if child.pidfd in ended]
        return [(index, self._calls.pop(index).take()) for index in over]

    def kill(self) -> None:
        for child in self._calls.values():
            send_signal(child.pidfd, signal.SIGKILL)

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
        """Waits for the end of the process; returns the outcome."""
        code = reap(self.pidfd)
        data = os.pread(self._report, os.fstat(self._report).st_size, 0)
        os.close(self._report)
        os.close(self.pidfd)
        try:
            outcome = Outcome.decode(data)
        except ValueError:  # an empty or incomplete report
            return ended_badly(code)
        # The report is the child's last action. Its exit code agrees, unless other code reaped it
        # first; a signal at the last moment counts as one in the middle of the call.
        return ended_badly(code) if code < 0 else outcome


def _fork(body: Callable[[], Outcome], nice: int) -> _Child:
    report = os.memfd_create("outlast-report", os.MFD_CLOEXEC)
    parent = os.getpid()
    try:
        pid = fork_detached(lambda: _run_child(body, parent, report, nice), new_session=False)
    except BaseException:
        os.close(report)
        raise
    try:
        return _Child(os.pidfd_open(pid), report)
    except OSError:  # too many open files; or it has ended, in a program that ignores SIGCHLD
        os.close(report)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise


def _run_child(body: Callable[[], Outcome], parent: int, report: int, nice: int) -> None:
    replace_tcp_sockets()
    torch = sys.modules.get("torch")
    if torch is not None:
        # The child lacks the threads of the OpenMP pool. With one thread, torch uses none of them;
        # with more, the first large operation would wait for them forever.
        torch.set_num_threads(1)
    lower_priority(nice, own_session=False)
    end_with_parent(parent)
    outcome = body()
    flush_streams()
    os.write(report, outcome.encode())
