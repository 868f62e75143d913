"""The heartbeat thread, with real threads: progress, a hang in C, and the end of the monitor.

A thread is known to hang in C, since it is in `system(3)` and the shell reports that it is.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outlast.inprocess.monitor.heartbeat_thread import HeartbeatThread
from outlast.inprocess.monitor.shared_page import Activity, SharedPage
from outlast.metrics import progress_page

INTERVAL = 0.002
NET_S = 60.0


class Ticks:
    """A clock that never returns the same time twice."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        self.time += 1.0
        return self.time


_ACTIVITY = progress_page.Page.__dict__["activity"]


class Page(SharedPage):
    """Calls `on_look` whenever the heartbeat thread begins a check."""

    on_look: Callable[[], None] = staticmethod(lambda: None)

    @property
    def activity(self) -> int:  # type: ignore[override]
        if threading.current_thread().name == "outlast-heartbeat":
            self.on_look()
        return int(_ACTIVITY.__get__(self, Page))

    @activity.setter
    def activity(self, value: int) -> None:
        _ACTIVITY.__set__(self, value)


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page()
    made.activity = Activity.FUNCTION
    yield made
    made.close()


class Watched:
    """A heartbeat thread that watches the calling thread."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.lost: list[int] = []
        self.was_lost = threading.Event()

    def __enter__(self) -> Watched:
        self.near, self.far = socket.socketpair()
        self.heartbeat = HeartbeatThread(self.page, Ticks(), INTERVAL, self.near, self._lost)
        return self

    def _lost(self) -> None:
        self.lost.append(threading.get_ident())
        self.was_lost.set()

    def __exit__(self, *error: object) -> None:
        self.heartbeat.close()
        self.near.close()
        self.far.close()

    def looks(self, count: int) -> None:
        """Waits until the heartbeat thread has checked `count` times."""
        enough, seen = threading.Event(), [0]

        def look() -> None:
            seen[0] += 1
            if seen[0] > count:
                enough.set()

        self.page.on_look = look
        assert enough.wait(NET_S)


def in_this_thread(work: Callable[[], Any]) -> Any:
    return work()


def in_another_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(NET_S)


@pytest.fixture(params=[in_this_thread, in_another_thread])
def thread(request: pytest.FixtureRequest) -> Any:
    return request.param


def run_until(met: Callable[[], bool]) -> None:
    while not met():
        pass


def test_progress_is_stamped_while_python_runs(page: Page, thread: Any) -> None:
    def work() -> None:
        with Watched(page):
            run_until(lambda: page.progress > 0)
            first = page.progress
            run_until(lambda: page.progress > first)  # not only once

    thread(work)


def test_a_thread_that_hangs_in_c_makes_no_progress(page: Page, thread: Any) -> None:
    told, say = os.pipe()
    wait, release = os.pipe()
    os.set_blocking(told, False)
    for descriptor in (say, wait):
        os.set_inheritable(descriptor, True)
    seen: list[float] = []

    def look() -> None:
        if not seen:
            try:
                os.read(told, 1)
            except BlockingIOError:
                return  # it does not hang yet
        seen.append(page.progress)
        if len(seen) == 8:
            os.write(release, b"\n")

    def work() -> None:
        page.on_look = look
        with Watched(page):
            os.system(f"printf x >/dev/fd/{say}; read line </dev/fd/{wait}")
            hung_until = page.progress
            run_until(lambda: page.progress > hung_until)  # and progress continues

    try:
        thread(work)
    finally:
        for descriptor in (told, say, wait, release):
            os.close(descriptor)
    # The first checks may find that the thread was elsewhere before.
    assert len(set(seen[2:8])) == 1, seen


@pytest.mark.parametrize("activity", [Activity.WAITING, Activity.LEAVING, Activity.DONE])
def test_nothing_is_stamped_where_it_is_not_asked_for(page: Page, activity: Activity) -> None:
    page.activity = activity
    with Watched(page) as watched:
        watched.looks(3)
    assert page.progress == 0


def test_the_end_of_the_monitor_is_told_once(page: Page) -> None:
    with Watched(page) as watched:
        watched.looks(2)
        assert not watched.lost
        watched.far.close()
        assert watched.was_lost.wait(NET_S)
        watched.looks(3)
        assert len(watched.lost) == 1
        assert watched.lost != [threading.get_ident()]
