"""Threads in the background, and several for one piece of work: its error keeps nothing alive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def start_thread(name: str, work: Callable[..., object], *arguments: Any) -> threading.Thread:
    """A new thread that calls `work`, and does not hold up the end of the process."""
    thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
    thread.start()
    return thread


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
