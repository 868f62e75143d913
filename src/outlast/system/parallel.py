"""Threads in the background, several for one piece of work, and one that waits in C++ for another,
where Python cannot interrupt it. Their errors keep nothing alive.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from outlast.system.error_text import release_frames

T = TypeVar("T")


def start_thread(name: str, work: Callable[..., object], *arguments: Any) -> threading.Thread:
    """A new thread that calls `work`, and does not hold up the end of the process."""
    thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
    thread.start()
    return thread


def start_unawaited(work: Callable[[], object], started: list[int]) -> None:
    """Starts a thread that calls `work`, and raises nothing; the caller goes on at once, where
    `Thread.start` waits until the new thread runs: milliseconds if the processors are in use. An
    interrupt comes before it is started, or after it was added to `started`.
    """
    started.extend(map(_thread.start_new_thread, [work], [()]))


def in_threads(
    work: Callable[[Iterator[T]], None], items: Iterable[T], threads: int, name: str
) -> None:
    """Runs `work` in each of `threads` threads, whose names begin with `name`, on an iterator over
    those of the `items` that no other thread has taken. Returns when all have ended; raises the
    error of the first that failed, after which none gets another item.
    """
    left, lock, failed = iter(items), threading.Lock(), threading.Event()

    def shared() -> Iterator[T]:
        while not failed.is_set():
            with lock:
                item = next(left, None)
            if item is None:
                return
            yield item

    def run() -> None:
        try:
            work(shared())
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(threads, name) as pool:
        running = [pool.submit(run) for _ in range(threads)]
    ended = (each.exception() for each in running)
    errors = [error for error in ended if error is not None]
    # No local variable may hold the error that is raised: its traceback holds this frame, and all
    # that it reaches (memory of the size of the training state) would stay until the garbage
    # collector finds the cycle, in a process that collects seldom or not at all.
    running.clear()
    if errors:
        raise errors.pop(0)


class ThreadedWait(Generic[T]):
    """A wait that nothing can end, run in a thread, so that its caller waits in Python.

    Neither Ctrl-C nor a restart in place interrupts a thread that waits in C++, and no other thread
    ends a wait at a store. `over` is set when the wait has ended, or was abandoned.
    """

    def __init__(self, wait: Callable[[], T], name: str) -> None:
        self.over = threading.Event()
        self._value: T | None = None
        self._error: Exception | None = None
        self._abandoned: Exception | None = None
        # The thread forgets `wait` at its end: it may be a method of what holds this object.
        self._thread = start_thread(name, self._run, wait)

    def result(self) -> T:
        """Waits for the end; returns or raises what the wait did, or what it was abandoned with."""
        self.over.wait()
        if self._abandoned is not None:
            raise self._abandoned
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def abandon(self, error: Exception) -> None:
        """Makes `result` raise `error`. The thread continues until its wait or the store ends."""
        self._abandoned = error
        self.over.set()

    def _run(self, wait: Callable[[], T]) -> None:
        try:
            self._value = wait()
        except Exception as e:  # noqa: BLE001 - `result` raises it
            # They refer to the owner of the wait, which has the error: it would remain, with its
            # connections, in a cycle.
            release_frames(e)
            self._error = e
        self.over.set()
        del self, wait  # this frame is one of the error's
