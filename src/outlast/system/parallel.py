"""One piece of work in several threads; the error that is raised keeps nothing else alive."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def in_threads(work: Callable[[], None], threads: int, name: str) -> None:
    """Runs `work`, which takes items of a shared queue until it is empty, in each of `threads`
    threads. Returns when all have ended; raises the error of the first that failed. `name` is the
    prefix of their names.
    """
    with ThreadPoolExecutor(threads, name) as pool:
        running = [pool.submit(work) for _ in range(threads)]
    ended = (each.exception() for each in running)
    errors = [error for error in ended if error is not None]
    # No local variable may hold the error that is raised: its traceback holds this frame, and all
    # that it reaches (memory of the size of the training state) would stay until the garbage
    # collector finds the cycle, in a process that collects seldom or not at all.
    running.clear()
    if errors:
        raise errors.pop(0)
