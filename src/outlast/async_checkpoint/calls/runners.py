"""The processes that run background calls: a fork for each call, or one worker for all of them.

A fork has a copy-on-write copy of everything, so closures work and nothing is pickled. It cannot
use CUDA (move tensors to the CPU first), and has neither the parent's threads nor its network
connections. Those are replaced in the child: two processes cannot use one connection, and a copy in
the child would keep a connection, or the port of a store, open after the parent has closed it,
while peers wait for it to close. The child reports in an in-memory file, not a pipe: it never waits
for a reader, a surviving grandchild does not delay the end, and the report is complete when the
pidfd signals the end of the child. It exits by `os._exit`, without the parent's exit handlers.

A worker (`worker_main.py`) runs one call at a time; the others wait here. So a worker that dies
fails one call, and the others go to the next worker. The pickle is in an in-memory file, whose
descriptor is sent: the parent waits for no reader, and there is one copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from outlast.system.background_process import BackgroundProcess, start_process
from outlast.system.error_text import describe, exit_text, traceback_text
from outlast.system.fork import flush_streams, fork_detached
from outlast.system.parallel import start_thread
from outlast.system.processes import end_with_parent, lower_priority, readable, reap, send_signal
from outlast.system.sockets import replace_tcp_sockets

importing_main = False
"""Whether the parent's program is being imported in this process, a worker."""

_WORKER = "outlast.async_checkpoint.calls.worker_main"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a call ended in this rank's background process. `cause` is `None` for success."""

    cause: str | None = None
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, what: str = "") -> Outcome:
        return cls(f"{what}{describe(error)}", traceback_text(error))

    @classmethod
    def of_lost(cls, exit_code: int) -> Outcome:
        """The outcome of a call whose process ended without reporting one. That is never success:
        `os._exit(0)` in the middle of a save also ends with code 0.
        """
        if exit_code >= 0:
            how = f"its process ended with exit code {exit_code}, in the middle of the call"
            return cls(how)
        return cls(f"its process {exit_text(exit_code)}")

    def encode(self) -> bytes:
        return json.dumps([self.cause, self.traceback]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Outcome:
        """The inverse of `encode`; raises `ValueError` for other data."""
        cause, traceback = json.loads(data)
        return cls(cause, traceback)


Ended = Callable[[int, Outcome], None]
"""Called in a thread of a runner, with the index of a call and its outcome."""


class Runner(Protocol):
    """Runs calls in the background; the main thread uses it. `pid` is that of the last process that
    it has started, `None` while there is none.
    """

    @property
    def pid(self) -> int | None: ...

    def start(
        self, index: int, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Starts call `index`, or queues it, with the arguments as they are now. A `TypeError`
        names a function that cannot be sent, an `OSError` says that no process can be started.
        """

    def kill(self) -> None:
        """Kills all running calls, and drops those that wait. No call is started afterwards."""

    def close(self) -> None:
        """Kills and reaps all processes, and releases resources. Not in a thread of the runner."""


def name_of(fn: Callable[..., Any] | None) -> str:
    """The name of a function in messages; the same on all ranks."""
    if fn is None:
        return "nothing"
    inner = getattr(fn, "func", fn)  # of a `functools.partial`
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    module = getattr(inner, "__module__", None)
    return f"{module}.{name}" if module and module != "__main__" else str(name)


def run_here(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
    """Runs in the background process: calls the function and returns the outcome."""
    try:
        fn(*args, **kwargs)
    except SystemExit as e:
        # As for a program: `None` and 0 mean success, a number is a code, all else a message.
        if e.code is not None and e.code != 0:
            return Outcome(f"it exited with code {e.code}", traceback_text(e))
    except BaseException as e:  # noqa: BLE001 - reported to the parent process
        return Outcome.of(e)
    return Outcome()


def _await_copies() -> None:
    """Waits for pending copies from devices (`non_blocking=True`): a snapshot of their target must
    not contain half a tensor. Of all devices, as a model may be on several.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        from outlast.system import devices  # it imports torch

        accelerator = devices.in_use()
        for index in () if accelerator is None else accelerator.held():
            torch.accelerator.synchronize(index)


class ForkRunner:
    """A `Runner` that forks for every call, so calls run in parallel. A thread waits for each."""

    def __init__(self, ended: Ended, nice: int = 10) -> None:
        self._ended, self._nice = ended, nice
        self._calls: dict[int, threading.Thread] = {}  # by pidfd
        self._reaping = threading.Lock()  # guards `_calls`, and its descriptors
        self.pid: int | None = None
        self._killed = False

    def start(
        self, index: int, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        _await_copies()
        report = os.memfd_create("outlast-report", os.MFD_CLOEXEC)
        parent, pid = os.getpid(), 0
        try:
            pid = fork_detached(
                lambda: _run_child(lambda: run_here(fn, args, kwargs), parent, report, self._nice),
                new_session=False,
            )
            # Fails with too many open files; or it has ended, in a program that ignores SIGCHLD.
            pidfd = os.pidfd_open(pid)
        except BaseException:
            os.close(report)
            if pid:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            raise
        self.pid = pid
        with self._reaping:
            self._calls[pidfd] = start_thread("outlast-call", self._wait, index, pidfd, report)
            if self._killed:  # by another thread, while this one forked
                send_signal(pidfd, signal.SIGKILL)

    def kill(self) -> None:
        with self._reaping:
            self._killed = True
            for pidfd in self._calls:
                send_signal(pidfd, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        for thread in list(self._calls.values()):
            thread.join()

    def _wait(self, index: int, pidfd: int, report: int) -> None:
        readable(pidfd)
        with self._reaping:
            code = reap(pidfd)
            del self._calls[pidfd]
            os.close(pidfd)
        data = os.pread(report, os.fstat(report).st_size, 0)
        os.close(report)
        try:
            outcome = Outcome.decode(data)
        except ValueError:  # an empty or incomplete report
            outcome = Outcome.of_lost(code)
        # The report is the child's last action. Its exit code agrees, unless other code reaped it
        # first; a signal at the last moment counts as one in the middle of the call.
        self._ended(index, Outcome.of_lost(code) if code < 0 else outcome)


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


class WorkerRunner:
    """A `Runner` with one persistent process, to which a thread hands one call after another."""

    def __init__(self, ended: Ended, nice: int = 10) -> None:
        self._ended, self._nice = ended, nice
        self._worker: BackgroundProcess | None = None
        self._starting = threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._killed = False

    @property
    def pid(self) -> int | None:
        worker = self._worker
        return None if worker is None else worker.pid

    def start(
        self, index: int, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if importing_main:
            raise RuntimeError(
                "this program is being imported by its own worker: what it does when it is run "
                'must stand under `if __name__ == "__main__":`'
            )
        _await_copies()
        descriptor = _pickled(fn, args, dict(kwargs))
        try:
            self._running()
        except OSError:
            os.close(descriptor)
            raise
        if self._thread is None:
            self._thread = start_thread("outlast-worker", self._run)
        self._waiting.put((index, descriptor))

    def kill(self) -> None:
        self._killed = True
        with self._starting:
            if self._worker is not None:
                self._worker.kill()

    def close(self) -> None:
        self.kill()
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _running(self) -> tuple[BackgroundProcess, bool]:
        """The worker, and whether it is new. One that has died between two calls is replaced."""
        with self._starting:
            worker = self._worker
            if worker is not None and worker.alive:
                return worker, False
            if worker is not None:
                worker.close()
            self._worker = worker = start_process(_WORKER, arguments=[str(self._nice)])
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            worker.channel.send(json.dumps(_surroundings()).encode())
        return worker, True

    def _run(self) -> None:
        while (call := self._waiting.get()) is not None:
            index, descriptor = call
            if not self._killed:
                try:
                    outcome = self._outcome_of(descriptor)
                except OSError as e:
                    outcome = Outcome.of(e, "no worker: ")
                self._ended(index, outcome)
            os.close(descriptor)

    def _outcome_of(self, descriptor: int) -> Outcome:
        worker, new = self._running()
        try:
            worker.channel.send(b"", [descriptor])
        except (BrokenPipeError, ConnectionResetError):
            # It has died. The call goes to the next one; but if this one was new, the call fails,
            # otherwise workers would be started forever.
            if not new and not self._killed:
                self._end()
                return self._outcome_of(descriptor)
        try:
            return Outcome.decode(worker.channel.receive()[0])
        except EOFError:
            # It is ending, or a call has closed its end of the channel, which ends all reports. If
            # it is ending already, a kill no longer changes its exit code.
            return Outcome.of_lost(self._end())

    def _end(self) -> int:
        with self._starting:
            worker, self._worker = self._worker, None
            assert worker is not None
            worker.kill()
            return worker.close()


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """A descriptor of an in-memory file that holds the call."""
    descriptor = os.memfd_create("outlast-call", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            pickle.dump((fn, args, kwargs), file, protocol=pickle.HIGHEST_PROTOCOL)
    except BaseException as e:
        os.close(descriptor)
        if isinstance(e, OSError) or not isinstance(e, Exception):
            raise
        # Pickle has no single error type for this: a lambda is an AttributeError, a lock a
        # TypeError, and a method of an object may raise anything.
        raise TypeError(
            f"{name_of(fn)} cannot be given to a persistent worker, for it, or an argument, cannot "
            f"be pickled: {describe(e)}"
        ) from e
    return descriptor


def _surroundings() -> dict[str, Any]:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return {
        "path": [str(entry) for entry in sys.path],
        "argv": [str(each) for each in sys.argv],
        "main_name": None if spec is None else spec.name,
        "main_file": getattr(main, "__file__", None) if spec is None else None,
    }
