"""What a test may not leave behind: threads, descriptors, children, signal and log handlers.

`no_leaks()` takes a snapshot of the process before and after a block, and raises `LeakError` naming
each new resource. `conftest.py` wraps every test in it.

Resources that end by themselves (a C++ thread, a child that was told to end) have until a deadline,
which is generous: it is a safety net on a busy machine, not a measurement.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil

SETTLE_S = 15.0
"""How long a resource may take to end before it counts as leaked."""

# Each exemption is by name, and states the owner.
EXEMPT_THREADS = ("pytest_timeout ",)  # pytest-timeout's timer for the next test
EXEMPT_DESCRIPTORS = ("/dev/nvidia",)  # CUDA's, held from its first use until exit
# C++ threads that torch ends with the objects that own them; other native threads (OpenMP's,
# autograd's, CUDA's) belong to pools that live as long as the process.
NATIVE_THREADS = ("gloo", "pt_gloo", "pt_tcpstore", "pt_nccl")


class LeakError(AssertionError):
    """Something outlived the block that made it."""


@dataclass(frozen=True)
class Snapshot:
    """The resources of the process at one moment."""

    threads: frozenset[threading.Thread]
    native_threads: dict[int, str]
    descriptors: dict[int, str]
    children: frozenset[psutil.Process]
    signal_handlers: dict[signal.Signals, Any]
    blocked_signals: frozenset[int]
    logging_handlers: dict[str, tuple[logging.Handler, ...]]

    @classmethod
    def take(cls) -> Snapshot:
        """The process as it is now."""
        return cls(
            threads=frozenset(_threads()),
            native_threads=_native_threads(),
            descriptors=_descriptors(),
            children=frozenset(_children()),
            signal_handlers=_signal_handlers(),
            blocked_signals=frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            logging_handlers=_logging_handlers(),
        )

    def leaks_in(self, after: Snapshot) -> list[str]:
        """One line for each resource in `after` that is not in this snapshot."""
        return [
            *(_describe_thread(thread) for thread in after.threads - self.threads),
            *(
                f"native thread {name!r} (tid {tid})"
                for tid, name in after.native_threads.items()
                if tid not in self.native_threads
            ),
            *(
                f"file descriptor {fd} -> {target}"
                for fd, target in after.descriptors.items()
                if self.descriptors.get(fd) != target
            ),
            *(_describe_process(child) for child in after.children - self.children),
            *(
                f"signal handler of {number.name}: {now!r}, was {self.signal_handlers[number]!r}"
                for number, now in after.signal_handlers.items()
                if now != self.signal_handlers[number]
            ),
            *(
                f"signal {_signal_name(number)} {verb} blocked"
                for verb, numbers in (
                    ("left", after.blocked_signals - self.blocked_signals),
                    ("no longer", self.blocked_signals - after.blocked_signals),
                )
                for number in numbers
            ),
            *(
                f"logging handler {handler!r} on {name or 'the root logger'!r}"
                for name, handlers in after.logging_handlers.items()
                for handler in handlers
                if handler not in self.logging_handlers.get(name, ())
            ),
            *(
                f"logging handler {handler!r} taken from {name or 'the root logger'!r}"
                for name, handlers in self.logging_handlers.items()
                for handler in handlers
                if handler not in after.logging_handlers.get(name, ())
            ),
        ]


@contextmanager
def no_leaks() -> Iterator[None]:
    """Raises `LeakError` if the block leaves anything behind that does not end by itself."""
    before = Snapshot.take()
    yield
    found = settled_leaks(before)
    if found:
        raise LeakError("left behind:\n" + "\n".join(f"  - {line}" for line in found))


def settled_leaks(before: Snapshot) -> list[str]:
    """The new resources since `before`, once those ending have ended or `SETTLE_S` is over."""
    found = before.leaks_in(Snapshot.take())
    if not found:
        return []
    gc.collect()  # objects held only by a reference cycle are not leaks
    deadline = time.monotonic() + SETTLE_S
    pause_s = 0.001
    while (after := Snapshot.take()) and (found := before.leaks_in(after)):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return found
        # No event announces that a C++ thread has closed its descriptors, so this polls;
        # a Python thread is waited for by its end.
        pause_s = min(pause_s * 2, 0.1, left_s)
        ending = next(iter(after.threads - before.threads), None)
        if ending is None:
            time.sleep(pause_s)
        else:
            ending.join(pause_s)
    return []


def _threads() -> Iterator[threading.Thread]:
    for thread in threading.enumerate():
        if thread.name.startswith(EXEMPT_THREADS):
            continue
        # A C++ thread that once ran Python stays listed after its end, until 3.13.
        if isinstance(thread, threading._DummyThread) and not _task_exists(thread.native_id):
            continue
        yield thread


def _task_exists(tid: int | None) -> bool:
    return tid is not None and Path(f"/proc/self/task/{tid}").exists()


def _native_threads() -> dict[int, str]:
    names: dict[int, str] = {}
    for tid in os.listdir("/proc/self/task"):
        try:
            name = Path(f"/proc/self/task/{tid}/comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        if name.startswith(NATIVE_THREADS):
            names[int(tid)] = name
    return names


def _descriptors() -> dict[int, str]:
    exempt_fd = resource_tracker._resource_tracker._fd  # multiprocessing's own, for life
    targets: dict[int, str] = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:
            continue  # the descriptor that listed the folder
        if int(entry) != exempt_fd and not target.startswith(EXEMPT_DESCRIPTORS):
            targets[int(entry)] = target
    return targets


def _children() -> Iterator[psutil.Process]:
    exempt_pid = resource_tracker._resource_tracker._pid  # multiprocessing's own, for life
    for pid in _descendants():
        if pid != exempt_pid:
            with contextlib.suppress(psutil.NoSuchProcess):
                yield psutil.Process(pid)


def _descendants() -> Iterator[int]:
    """The kernel's lists of children, where available, save a scan of all processes."""
    if not Path("/proc/thread-self/children").exists():
        yield from (child.pid for child in psutil.Process().children(recursive=True))
        return
    parents = [os.getpid()]
    while parents:
        parent = parents.pop()
        threads = list[str]()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            threads = os.listdir(f"/proc/{parent}/task")
        for thread in threads:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children = Path(f"/proc/{parent}/task/{thread}/children").read_text()
                found = [int(pid) for pid in children.split()]
                yield from found
                parents += found


def _signal_handlers() -> dict[signal.Signals, Any]:
    return {
        number: signal.getsignal(number)
        for number in sorted(signal.valid_signals())
        if isinstance(number, signal.Signals)
    }


def _logging_handlers() -> dict[str, tuple[logging.Handler, ...]]:
    loggers: dict[str, logging.Logger] = {"": logging.getLogger()}
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.split(".")[0] == "outlast" and isinstance(logger, logging.Logger):
            loggers[name] = logger
    return {
        name: tuple(h for h in logger.handlers if not type(h).__module__.startswith("_pytest."))
        for name, logger in loggers.items()
    }


def _describe_thread(thread: threading.Thread) -> str:
    kind = "daemon thread" if thread.daemon else "thread"
    return f"{kind} {thread.name!r} (ident {thread.ident})"


def _describe_process(process: psutil.Process) -> str:
    return f"child process {process.pid}, {_ask(process.status)}: {_ask(process.cmdline)}"


def _ask(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except psutil.Error as error:
        return type(error).__name__


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if isinstance(number, signal.Signals) else str(number)
