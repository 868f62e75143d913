"""Runs tasks in threads, a few at a time, and gives their results in the order of their starts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

T = TypeVar("T")

_LOOK_S = 0.1


class Cancelled(BaseException):
    """Ends a task that runs, because the campaign ends."""


class SideBySide(Generic[T]):
    """Runs tasks in threads.

    Args:
        jobs: how many at a time.
        next_task: the next task to start, or `None` if none is to be started now. It is called
            again whenever a task has ended.
    """

    def __init__(self, jobs: int, next_task: Callable[[], Callable[[], T] | None]) -> None:
        self._jobs = jobs
        self._next_task = next_task
        self._cancelled = threading.Event()

    def check(self) -> None:
        """Called by the tasks, often.

        Raises:
            Cancelled: if the task should end.
        """
        if self._cancelled.is_set():
            raise Cancelled

    def results(self, look: Callable[[], None]) -> Generator[T]:
        """Runs all tasks, and yields their results in the order of their starts.

        An error in a task, or in the caller (such as Ctrl-C), ends the tasks that run; it is raised
        when they have ended.

        Args:
            look: called in this thread, several times a second.
        """
        with ThreadPoolExecutor(self._jobs, thread_name_prefix="outlast-round") as pool:
            try:
                yield from self._results(pool, look)
            finally:
                self._cancelled.set()

    def _results(self, pool: ThreadPoolExecutor, look: Callable[[], None]) -> Generator[T]:
        started: deque[Future[T]] = deque()
        while True:
            running = [task for task in started if not task.done()]
            while len(running) < self._jobs and (task := self._next_task()) is not None:
                running.append(pool.submit(task))
                started.append(running[-1])
            if not started:
                return
            for ended in wait(running, _LOOK_S, FIRST_COMPLETED).done:
                ended.result()  # an error is raised at once
            look()
            while started and started[0].done():
                yield started.popleft().result()
