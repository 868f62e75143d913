"""Which silence is a hang to the monitor process, on a fake clock. The rank tests show the rest."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from outlast.clock import FakeClock
from outlast.inprocess.monitor import progress_timeouts
from outlast.inprocess.monitor.progress_timeouts import ProgressTimeouts
from outlast.inprocess.progress.shared_page import Activity, SharedPage

HARD_S = 90.0


class Timeouts(ProgressTimeouts):
    """Notes what it would send, and why."""

    def __init__(self, page: SharedPage, clock: FakeClock, hard: float = HARD_S) -> None:
        self.sent: list[str] = []
        self.page, self.clock = page, clock
        reports = SimpleNamespace(
            hard_timeout=lambda idle, what: self.sent.append(f"{what} {idle:g}"),
            soft_timeout=lambda idle, limit: None,
        )
        plan = SimpleNamespace(page=page, soft=60.0, hard=hard, grace=1.0)
        super().__init__(plan, clock, reports, 0)  # type: ignore[arg-type]

    def after(self, *seconds: float) -> list[str]:
        for each in seconds:
            self.clock.advance(each)
            self.check()
        return self.sent


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    monkeypatch.setattr(progress_timeouts, "send_signal", lambda *_: None)
    clock = FakeClock()
    clock.advance(1000)
    return clock


def waiting(page: SharedPage, clock: FakeClock, **options: Any) -> Timeouts:
    page.heartbeat = clock.now()
    page.enter(Activity.WAITING, clock.now())
    return Timeouts(page, clock, **options)


def test_a_wait_lasts_as_long_as_the_heartbeat_thread_runs(
    page: SharedPage, clock: FakeClock
) -> None:
    timeouts = waiting(page, clock)
    for _ in range(5):
        assert timeouts.after(HARD_S - 1) == []
        page.heartbeat = clock.now()


def test_a_silent_process_is_ended_after_the_hard_timeout(
    page: SharedPage, clock: FakeClock
) -> None:
    timeouts = waiting(page, clock)
    assert timeouts.next_check() == clock.now() + HARD_S
    assert timeouts.after(HARD_S - 1, 1, 1) == ["no Python code has run 90"]


def test_a_short_hard_timeout_leaves_a_busy_machine_its_time(
    page: SharedPage, clock: FakeClock
) -> None:
    timeouts = waiting(page, clock, hard=1.0)
    assert timeouts.after(4.9) == []
    assert timeouts.after(0.2) == ["no Python code has run 5.1"]


def test_without_a_heartbeat_thread_nothing_is_silent(page: SharedPage, clock: FakeClock) -> None:
    timeouts = waiting(page, clock)
    page.heartbeat = 0.0
    assert timeouts.next_check() == math.inf
    assert timeouts.after(1000) == []


def test_a_heartbeat_thread_that_ends_between_two_reads_was_not_silent(
    page: SharedPage, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a wait that was longer than the hard timeout, at the end of the call."""
    timeouts = waiting(page, clock)
    clock.advance(HARD_S + 1)
    reads = iter([clock.now()])
    heartbeat = property(lambda page: next(reads, 0.0))
    monkeypatch.setattr(SharedPage, "heartbeat", heartbeat, raising=False)
    assert timeouts.after(1) == []


def test_a_long_phase_that_has_just_ended_was_no_silence(
    page: SharedPage, clock: FakeClock
) -> None:
    page.heartbeat = clock.now()
    page.enter(Activity.FUNCTION, clock.now())
    page.long_limit = 600.0
    timeouts = Timeouts(page, clock)
    assert timeouts.after(500) == []  # with the GIL held all the time
    page.enter(Activity.WAITING, clock.now())
    assert timeouts.after(1) == []


@pytest.mark.parametrize("activity", [Activity.WAITING, Activity.FUNCTION])
def test_all_timeouts_begin_again_after_a_pause_of_both_processes(
    page: SharedPage, clock: FakeClock, activity: Activity
) -> None:
    timeouts = waiting(page, clock)
    page.enter(activity, clock.now())
    clock.advance(500)
    timeouts.continued()
    assert timeouts.after(HARD_S - 1) == []
    (sent,) = timeouts.after(1)
    assert sent.endswith(f" {HARD_S:g}")
