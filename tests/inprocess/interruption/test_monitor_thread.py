"""The monitor thread: it waits on the store, watches an iteration, and always answers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fake_clock import FakeClock
from outlast.coordination.membership import COMPLETED, RESTART
from outlast.coordination.stores.store import KeyTimeout
from outlast.errors import RankShouldRestart, StoreError
from outlast.events.emitter import Emitter, MemorySink
from outlast.events.event import Event
from outlast.events.types import AbortDone, Seen
from outlast.inprocess.interruption import communicators
from outlast.inprocess.interruption.interrupter import AtomicSection, Interrupter
from outlast.inprocess.interruption.monitor_thread import IterationWatch, MonitorThread
from outlast.inprocess.monitor.shared_page import Activity, SharedPage
from outlast.system.backends import Backend

NET_S = 60.0


class Answers:
    """A connection on which the test answers every wait."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def wait_for(self, key: str, timeout: float | None) -> bytes:
        self.asked.put(key)
        answer = self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def break_off(self) -> None:
        self.answers.put(StoreError("broken off"))


class FullDisk(MemorySink):
    def write(self, event: Event) -> None:
        raise OSError(28, "No space left on device")


class Rig:
    """A monitor thread for this thread."""

    def __init__(self) -> None:
        self.connection = Answers()
        self.interrupter = Interrupter()
        self.interrupter.install()
        self.atomic = AtomicSection(self.interrupter)
        self.page = SharedPage()
        self.emitter = Emitter(MemorySink(), clock=FakeClock(5.0))
        self.aborts: list[bool] = []
        self.abort: Callable[[bool], None] = self.aborts.append
        connection: Any = self.connection
        self.monitor = MonitorThread(
            connection,
            self.atomic,
            self.interrupter,
            self.page,
            lambda again: self.abort(again),
            self.emitter,
        )

    def run(
        self, answer: bytes | Exception, function: Callable[[], Any] | None = None
    ) -> IterationWatch:
        """Is in the function when the answer comes, and is interrupted."""
        watch = self.monitor.watch_iteration("over/0")
        self.page.activity = Activity.FUNCTION

        def work() -> None:
            self.connection.answers.put(answer)
            while True:
                pass

        value, error = self.interrupter.run(function or work)
        watch.left.set()
        assert isinstance(error, RankShouldRestart) or function is not None, (value, error)
        return watch

    def close(self) -> None:
        self.monitor.close(NET_S)
        self.interrupter.restore()
        self.page.close()

    @property
    def events(self) -> list[Event]:
        assert isinstance(self.emitter.sink, MemorySink)
        return self.emitter.sink.events


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()
    communicators.set_has_store(True)  # of the process: the next test may abort


def test_the_function_is_interrupted_after_the_abort(rig: Rig) -> None:
    seen: dict[str, Any] = {}

    def abort(again: bool) -> None:
        rig.aborts.append(again)
        seen.setdefault("activity", rig.page.activity)
        seen.setdefault("landed", rig.interrupter.landed)

    rig.abort = abort
    watch = rig.run(RESTART)
    assert watch.wait(NET_S) == RESTART
    assert watch.ending.is_set()
    assert watch.sample is not None
    assert "test_monitor_thread" in watch.sample.where
    assert not watch.sample.waits_for_others
    assert seen == {"activity": Activity.LEAVING, "landed": 0}
    assert rig.aborts[0] is False
    assert all(rig.aborts[1:])
    assert rig.page.progress == 5.0
    assert [type(event) for event in rig.events[:2]] == [Seen, AbortDone]
    with pytest.raises(RankShouldRestart), rig.atomic:  # atomic() cannot be entered
        pass


@pytest.mark.parametrize(
    ("least_hang", "reported", "sampled"), [(5.0, -1, True), (5.1, -1, False), (5.1, 0, True)]
)
def test_only_a_rank_that_may_hang_is_sampled(
    rig: Rig, least_hang: float, reported: int, sampled: bool
) -> None:
    """It has made no progress for five seconds; `reported`: its soft timeout is over."""
    rig.page.iteration, rig.page.reported_soft = 0, reported
    rig.monitor._least_hang = least_hang
    watch = rig.run(RESTART)
    assert watch.wait(NET_S) == RESTART
    assert (watch.sample is not None) == sampled


def test_a_thread_that_has_just_left_the_function_is_not_sampled_in_its_caller(rig: Rig) -> None:
    def abort(again: bool) -> None:
        rig.aborts.append(again)
        watch.left.set()

    rig.abort = abort
    rig.page.activity = Activity.FUNCTION  # until the thread has noted that it has left
    watch = rig.monitor.watch_iteration("over/0")
    rig.connection.answers.put(RESTART)
    assert watch.wait(NET_S) == RESTART
    assert watch.sample is None
    assert rig.aborts == [False]


def test_a_completed_iteration_is_left_alone(rig: Rig) -> None:
    rig.connection.answers.put(COMPLETED)
    watch = rig.monitor.watch_iteration("over/0")
    assert watch.wait(NET_S) == COMPLETED
    assert not watch.ending.is_set()
    assert (rig.aborts, rig.events) == ([], [])


@pytest.mark.parametrize(("answer", "aborted"), [(RESTART, 1), (StoreError("lost"), 0)])
def test_a_rank_that_has_lost_the_store_aborts_no_communicator(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, answer: Any, aborted: int
) -> None:
    """Others, whom nobody can tell of the abort, would use the garbage that it leaves."""

    class Group:
        def abort(self) -> None:
            aborts.append(self)

    group, aborts = Group(), []  # type: tuple[Any, list[Group]]
    monkeypatch.setattr(communicators, "communicators", lambda: [(group, Backend(group))])
    rig.abort = lambda again: communicators.begin_aborts()
    rig.run(answer)
    communicators.await_aborts()
    assert len(aborts) >= aborted
    assert not aborts or aborted


def test_a_lost_store_ends_the_iteration_and_is_told(rig: Rig) -> None:
    watch = rig.run(StoreError("lost"))
    with pytest.raises(StoreError, match="lost"):
        watch.wait(NET_S)
    assert isinstance(rig.events[0], Seen)
    assert rig.events[0].reason == "lost"


def test_an_abort_that_raises_does_not_delay_the_restart(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    def abort(again: bool) -> None:
        raise KeyError("no group")

    rig.abort = abort
    assert rig.run(RESTART).wait(NET_S) == RESTART
    (done,) = [event for event in rig.events if isinstance(event, AbortDone)]
    assert done.error == "KeyError('no group')"
    assert "abort raised an exception" in caplog.text


def test_an_interrupt_that_is_swallowed_is_repeated(rig: Rig) -> None:
    def swallow() -> int:
        rig.connection.answers.put(RESTART)
        for _ in range(3):
            try:
                while True:
                    pass
            except RankShouldRestart:
                pass
        return 3

    assert rig.run(RESTART, swallow).wait(NET_S) == RESTART
    assert rig.interrupter.landed >= 3
    assert "InterruptSwallowed" in [type(event).__name__ for event in rig.events]


def test_a_full_disk_under_the_events_is_logged_and_stops_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.emitter.sink = FullDisk()
    watch = rig.run(RESTART)
    assert watch.wait(NET_S) == RESTART
    assert watch.ending.is_set()
    assert [r.name for r in caplog.records].count("outlast.events") == 1
    rig.connection.answers.put(COMPLETED)  # and the thread is alive
    assert rig.monitor.watch_iteration("over/1").wait(NET_S) == COMPLETED


def test_a_guard_is_waited_for_within_a_limit() -> None:
    with pytest.raises(KeyTimeout, match=r"not over within 0\.0 s"):
        IterationWatch().wait(0.0)


def test_closing_breaks_off_a_wait(rig: Rig) -> None:
    watch = rig.monitor.watch_iteration("over/0")
    watch.left.set()
    assert rig.connection.asked.get() == "over/0"
    rig.monitor.close(0.01)
    with pytest.raises(StoreError, match="broken off"):
        watch.wait(NET_S)
    assert "outlast-monitor" not in [thread.name for thread in threading.enumerate()]
