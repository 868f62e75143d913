"""Tasks side by side: how many at a time, the order of their results, and how they are ended."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from outlast.campaign.side_by_side import SideBySide

NET_S = 60


def numbered(tasks: list[Callable[[], int]]) -> Callable[[], Callable[[], int] | None]:
    upcoming: Iterator[Callable[[], int]] = iter(tasks)
    return lambda: next(upcoming, None)


def test_results_come_in_the_order_of_the_starts() -> None:
    second_has_ended = threading.Event()

    def first() -> int:
        assert second_has_ended.wait(NET_S)
        return 1

    def second() -> int:
        second_has_ended.set()
        return 2

    tasks = SideBySide(2, numbered([first, second, lambda: 3]))
    assert list(tasks.results(lambda: None)) == [1, 2, 3]


def test_no_more_at_a_time_than_asked_for() -> None:
    both = threading.Barrier(2)
    running: list[int] = []
    most: list[int] = []

    def task() -> int:
        running.append(1)
        most.append(len(running))
        both.wait(NET_S)  # passes only with two at a time
        running.pop()
        return 0

    assert list(SideBySide(2, numbered([task] * 6)).results(lambda: None)) == [0] * 6
    assert max(most) == 2


@pytest.mark.parametrize("ended_by", ["an error in a task", "an error in the caller"])
def test_an_error_ends_the_tasks_that_run(ended_by: str) -> None:
    started, ended = threading.Event(), threading.Event()

    def endless() -> int:
        try:
            while True:
                started.set()
                tasks.check()
        finally:
            ended.set()

    def other() -> int:
        assert started.wait(NET_S)
        if "task" in ended_by:
            raise ArithmeticError
        return 1

    tasks = SideBySide(2, numbered([other, endless]))
    with pytest.raises(ArithmeticError), contextlib.closing(tasks.results(lambda: None)) as found:
        for _ in found:
            raise ArithmeticError
    assert ended.is_set()
