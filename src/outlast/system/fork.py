"""Forked children: one that runs a function apart from its parent, and how a stray one ends."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import NoReturn

log = logging.getLogger("outlast")

_SIGNALS_OF_JOB = (signal.SIGTERM, signal.SIGHUP)


def fork_detached(body: Callable[[], None], *, new_session: bool) -> int:
    """Forks a child that runs `body` and exits: with code 0, or 1 if it raised. Returns its ID.

    The child has a copy-on-write copy of the parent's memory, and none of its threads. Its signal
    handlers and signal mask are those of a new process, except that it ignores Ctrl-C, which is
    meant for the parent, and outlives the signals of a scheduler (`outlive_signals_of_job`). It
    keeps the parent's descriptors: `body` closes or replaces those that it must not hold open. It
    exits by `os._exit`: the parent's stack is not unwound, and the parent's exit handlers do not
    run. In a `new_session`, signals for the parent's process group do not reach it.
    """
    parent = os.getpid()
    flush_streams()  # otherwise the child would write the buffered text again
    with warnings.catch_warnings():
        # Python 3.12 warns of forks with threads. The child takes only the locks that Python
        # reinitializes after a fork, and those that `body` takes.
        warnings.simplefilter("ignore", DeprecationWarning)
        with signals_of_job_blocked():
            pid = os.fork()
            if pid == 0:
                _run_child(body, new_session, parent)
    return pid


def _run_child(body: Callable[[], None], new_session: bool, parent: int) -> NoReturn:
    code = 1
    try:
        gc.freeze()  # a collection would write to, and so copy, the pages shared with the parent
        if new_session:
            os.setsid()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, None):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        outlive_signals_of_job(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        body()
        code = 0
    except BaseException:  # noqa: BLE001 - the last frame of this process
        with contextlib.suppress(BaseException):
            traceback.print_exc()
            flush_streams()
    finally:
        os._exit(code)


def outlive_signals_of_job(parent: int) -> None:
    """Ignores SIGTERM and SIGHUP as long as `parent` lives; afterwards they end this process,
    unless SIGHUP was ignored before (`nohup`).

    For helpers, in their main thread. A scheduler that stops a job (Slurm's `scancel`, for one)
    signals all of its processes, and the ranks still need their helpers for the last save.
    """

    def on_signal(number: int, frame: object) -> None:
        if os.getppid() != parent:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in _SIGNALS_OF_JOB:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, on_signal)


@contextlib.contextmanager
def signals_of_job_blocked() -> Iterator[None]:
    """Blocks them in this thread, and so in a process it starts, until that handles them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_JOB)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@functools.cache
def keep_signals_at_forks() -> None:
    """Python forgets what arrives in a forked child before that runs, such as the SIGTERM of a pool
    that ends at once. Such a signal waits until then. This cannot be removed, and is harmless.
    """
    before = threading.local()

    def block() -> None:
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_JOB)

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    os.register_at_fork(before=block, after_in_parent=restore, after_in_child=restore)


def flush_streams() -> None:
    """Flushes the standard streams. There may be none, or a closed one, or a broken pipe."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()


def end_stray_child(error: BaseException | None) -> NoReturn:
    """Ends a child that user code forked, and that has left its code by `error` or a return.

    The frames below belong to its parent, with the parent's rank, connections and monitor process:
    none of them is unwound. The process ends with the exit code that it would have as a program.
    """
    code = 1
    try:
        if error is None:
            log.warning("process %d was forked in the function and returned from it", os.getpid())
            code = 0
        elif isinstance(error, SystemExit):
            code = _exit_code(error)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:
        os._exit(code)


def _exit_code(error: SystemExit) -> int:
    """As the interpreter does: a number, 0 for `None`, or 1 for a message."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1
