"""Which silence is a hang to the monitor process, on a fake clock. The rank tests show the rest."""

from __future__ import annotations

import dataclasses
import math
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from fake_clock import FakeClock
from outlast.inprocess.monitor import timeouts
from outlast.inprocess.monitor.shared_page import Activity, Blocked, SharedPage
from outlast.inprocess.monitor.timeouts import ProgressTimeouts
from outlast.inprocess.timeouts import Timeouts as WrapperTimeouts
from outlast.metrics.progress_page import Page

HARD_S = 90.0


class Timeouts(ProgressTimeouts):
    """Notes what it would send, and why."""

    def __init__(self, page: SharedPage, clock: FakeClock, hard: float = HARD_S) -> None:
        self.sent: list[str] = []
        self.page, self.clock = page, clock
        reports = SimpleNamespace(
            hard_timeout=lambda idle, what: self.sent.append(f"{what} {idle:g}"),
            soft_timeout=self._report,
            native_frames=lambda said: said and self.sent.append(said),
        )
        durations = dataclasses.replace(WrapperTimeouts().in_seconds(), hard=hard, grace=1.0)
        plan = SimpleNamespace(page=page, durations=durations)
        self.all_idle, self.computes = True, False
        self.waiting, self.went_on = False, 0
        idle_ranks = SimpleNamespace(wait=self._wait, go_on=self._go_on)
        cpu = SimpleNamespace(progress=0.0, queued=0.0, sample=self._sample)
        self.cpu = cpu
        self.read = True
        self.frames = SimpleNamespace(
            begin=lambda thread: None, is_over=lambda: self.read, said="", until=math.inf
        )
        super().__init__(
            *(plan, 1, clock, reports, 0, idle_ranks, cpu, self.frames)  # type: ignore[arg-type]
        )

    def _report(self, idle: float, limit: float, what: str) -> None:
        self.page.reported_soft = self.page.iteration
        self.sent.append(f"soft: no {what} {idle:g}")

    def _wait(self, confirm: float | None = None) -> bool:
        self.waiting = True
        return self.all_idle

    def _go_on(self) -> None:
        self.waiting = False
        self.went_on += 1

    def _sample(self, thread: int, **what: object) -> None:
        if self.computes:
            self.cpu.progress = self.clock.now()

    def after(self, *seconds: float) -> list[str]:
        for each in seconds:
            self.clock.advance(each)
            self.check()
        return self.sent


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    monkeypatch.setattr(timeouts, "send_signal", lambda *_: None)
    clock = FakeClock()
    clock.advance(1000)
    return clock


def waiting(page: SharedPage, clock: FakeClock, **options: Any) -> Timeouts:
    page.heartbeat = clock.now()
    page.enter(Activity.WAITING, clock.now())
    return Timeouts(page, clock, **options)


def test_the_signals_wait_until_the_native_frames_are_read(
    page: SharedPage, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[signal.Signals] = []
    monkeypatch.setattr(timeouts, "send_signal", lambda _, number: signals.append(number))
    timer = waiting(page, clock)
    timer.read, timer.frames.until = False, clock.now() + 2 * HARD_S
    timer.after(HARD_S + 1)
    assert (signals, timer.next_check()) == ([], timer.frames.until)
    timer.after(1.5)  # more than the grace time: it has not begun
    assert not signals
    timer.read, timer.frames.said = True, "are f (libc.so.6)"
    assert timer.after(0.5)[-1] == "are f (libc.so.6)"
    assert signals == [signal.SIGTERM, signal.SIGCONT]
    timer.after(1.1)
    assert signals[-1] == signal.SIGKILL


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


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_that_is_stopped_is_in_no_long_phase(
    page: SharedPage, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    monkeypatch.setattr(timeouts, "is_stopped", lambda pid: stopped)
    page.heartbeat = clock.now()
    page.enter(Activity.FUNCTION, clock.now())
    page.iteration, page.long_limit = 1, 600.0
    timer = Timeouts(page, clock)
    sent = timer.after(200, 59, 1, HARD_S - 60)  # it is seen to be stopped after 200 s
    assert sent == (["soft: no progress 60", f"no progress {HARD_S:g}"] if stopped else [])


@pytest.mark.parametrize("activity", [Activity.WAITING, Activity.FUNCTION])
def test_all_timeouts_begin_again_after_a_pause_of_both_processes(
    page: SharedPage, clock: FakeClock, activity: Activity
) -> None:
    timeouts = waiting(page, clock)
    page.enter(activity, clock.now())
    clock.advance(500)
    timeouts.continued()
    assert timeouts.after(HARD_S - 1) == []
    *_, sent = timeouts.after(1)
    assert sent.endswith(f" {HARD_S:g}")


def in_function(page: SharedPage, clock: FakeClock, blocked: Blocked, **options: Any) -> Timeouts:
    page.iteration = 0
    page.enter(Activity.FUNCTION, clock.now())
    page.blocked = blocked
    return Timeouts(page, clock, **options)


def passes(timeouts: Timeouts, seconds: int, *, python: bool = False) -> list[str]:
    """The heartbeat thread runs all the time; and Python code, if `python`."""
    for _ in range(seconds):
        timeouts.page.heartbeat = timeouts.clock.now() + 1
        if python:
            timeouts.page.progress = timeouts.clock.now() + 1
        timeouts.after(1)
    return timeouts.sent


def test_a_blocked_rank_hangs_whatever_others_do(page: SharedPage, clock: FakeClock) -> None:
    timeouts = in_function(page, clock, Blocked.ELSEWHERE)
    timeouts.all_idle = False
    assert passes(timeouts, 59) == []
    assert passes(timeouts, 1) == ["soft: no progress 60"]
    assert passes(timeouts, 30) == ["soft: no progress 60", "no progress 90"]


@pytest.mark.parametrize("blocked", [Blocked.WAITS, Blocked.UNKNOWN])
def test_a_rank_that_waits_for_others_hangs_if_all_do(
    page: SharedPage, clock: FakeClock, blocked: Blocked
) -> None:
    timeouts = in_function(page, clock, blocked)
    timeouts.all_idle = False
    assert passes(timeouts, 500) == []
    assert timeouts.waiting
    timeouts.all_idle = True
    assert passes(timeouts, 1) == ["soft: no progress 501"]


def test_a_wait_is_no_wait_once_it_goes_on(page: SharedPage, clock: FakeClock) -> None:
    timeouts = in_function(page, clock, Blocked.WAITS)
    timeouts.all_idle = False
    passes(timeouts, 70)
    assert timeouts.waiting
    passes(timeouts, 1, python=True)
    assert not timeouts.waiting
    page.blocked = Blocked.WAITS
    passes(timeouts, 70)
    page.enter(Activity.WAITING, clock.now())  # it has returned from the function
    passes(timeouts, 1)
    assert not timeouts.waiting


def test_a_wait_has_a_limit_of_its_own(page: SharedPage, clock: FakeClock) -> None:
    timeouts = in_function(page, clock, Blocked.WAITS)
    timeouts.all_idle = False
    assert passes(timeouts, 599) == []
    assert passes(timeouts, 1) == ["soft: no progress 600"]


def test_python_code_is_progress_up_to_the_limit_between_pings(
    page: SharedPage, clock: FakeClock
) -> None:
    timeouts = in_function(page, clock, Blocked.NO)
    assert passes(timeouts, 5000, python=True) == []  # it has not pinged
    page.pings, page.pinged = 1, clock.now()
    assert passes(timeouts, 599, python=True) == []
    assert passes(timeouts, 1, python=True) == ["soft: no ping 600"]


def test_a_learned_limit_is_one_between_pings(page: SharedPage, clock: FakeClock) -> None:
    timeouts = in_function(page, clock, Blocked.NO)
    page.pings, page.pinged, page.soft_limit = 1, clock.now(), 3.0
    assert passes(timeouts, 2, python=True) == []
    assert passes(timeouts, 1, python=True) == ["soft: no progress 3"]


def _short(page: SharedPage, clock: FakeClock) -> Timeouts:
    """A rank in its function that has pinged just now, with a learned limit of 0.1 s."""
    found = in_function(page, clock, Blocked.UNKNOWN)
    page.pings, page.pinged, page.soft_limit = 1, clock.now(), 0.1
    return found


def test_with_a_short_learned_limit_a_rank_at_work_has_a_second(
    page: SharedPage, clock: FakeClock
) -> None:
    timeouts = _short(page, clock)
    timeouts.computes = True  # it collects garbage
    assert timeouts.after(*[0.05] * 19) == []
    assert not timeouts.waiting
    assert timeouts.after(0.06) == ["soft: no progress 1.01"]


def test_with_a_short_learned_limit_the_time_without_a_core_does_not_count(
    page: SharedPage, clock: FakeClock
) -> None:
    timeouts = _short(page, clock)
    timeouts.cpu.queued, timeouts.computes = 7.0, True  # it has waited before
    for _ in range(30):
        assert timeouts.after(0.05) == []
        timeouts.cpu.queued += 0.025
    assert timeouts.after(*[0.05] * 4) == []
    assert timeouts.after(0.06) == ["soft: no progress 1.76"]


def test_who_waits_for_a_rank_at_work_leaves_it_to_the_monitor_of_that_rank(
    page: SharedPage, clock: FakeClock
) -> None:
    timeouts = _short(page, clock)
    timeouts.all_idle = False
    assert timeouts.after(*[0.05] * 49) == []
    assert timeouts.after(0.06) == ["soft: no progress 2.51"]


def test_with_a_short_learned_limit_all_ranks_are_late_or_none_is(
    page: SharedPage, clock: FakeClock
) -> None:
    timeouts = _short(page, clock)
    timeouts.all_idle = False  # the one that this rank waits for is at work
    assert timeouts.after(*[0.05] * 4) == []
    assert timeouts.waiting
    page.pinged = clock.now()
    assert timeouts.after(0.05) == []
    assert not timeouts.waiting
    timeouts.all_idle = True
    assert timeouts.after(0.04, 0.02) == ["soft: no progress 0.11"]


def test_a_short_learned_limit_is_looked_at_in_time(page: SharedPage, clock: FakeClock) -> None:
    timeouts = _short(page, clock)
    assert timeouts.next_check() - clock.now() == pytest.approx(0.05)
    clock.advance(0.06)
    assert timeouts.next_check() - clock.now() == pytest.approx(0.025)
    page.long_limit = 60.0  # a declared phase
    assert timeouts.next_check() - clock.now() > 1


@pytest.mark.parametrize("blocked", [Blocked.UNKNOWN, Blocked.ELSEWHERE])
def test_computing_is_progress(page: SharedPage, clock: FakeClock, blocked: Blocked) -> None:
    timeouts = in_function(page, clock, blocked)
    timeouts.computes = True
    assert passes(timeouts, 500) == []
    timeouts.computes = False
    assert passes(timeouts, 60) == ["soft: no progress 60"]


def test_computing_where_torch_waits_is_no_progress(page: SharedPage, clock: FakeClock) -> None:
    timeouts = in_function(page, clock, Blocked.WAITS)  # a device is waited for in a busy loop
    timeouts.computes = True
    assert passes(timeouts, 60) == ["soft: no progress 60"]


def test_a_stopped_process_hangs_though_it_was_waiting(page: SharedPage, clock: FakeClock) -> None:
    timeouts = in_function(page, clock, Blocked.WAITS)
    timeouts.all_idle = False
    assert passes(timeouts, 200) == []
    timeouts.after(*[1] * 59)  # without a heartbeat
    assert timeouts.sent == []
    assert timeouts.after(1) == ["soft: no progress 60"]
    assert timeouts.after(30)[1:] == ["no progress 90"]


@pytest.mark.parametrize("reads", range(1, 6))
def test_a_rank_told_to_leave_between_two_reads_gets_its_time_to_leave(
    page: SharedPage, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    """It has waited for the rank that hangs longer than its own hard timeout."""
    timeouts = in_function(page, clock, Blocked.WAITS)
    timeouts.all_idle = False
    passes(timeouts, int(HARD_S) + 10)
    word, seen = Page.__dict__["activity"], 0

    def activity(page: SharedPage) -> int:
        nonlocal seen
        seen += 1
        if seen == reads + 1:
            page.enter(Activity.LEAVING, clock.now())
        return int(word.__get__(page, SharedPage))

    both = property(activity, word.__set__)
    monkeypatch.setattr(SharedPage, "activity", both, raising=False)
    assert timeouts.after(0, 1) == []


def in_long_phase(page: SharedPage, clock: FakeClock, blocked: Blocked) -> Timeouts:
    timeouts = in_function(page, clock, blocked)
    page.long_limit = 1800.0
    return timeouts


@pytest.mark.parametrize("blocked", [Blocked.UNKNOWN, Blocked.ELSEWHERE, Blocked.COLLECTIVE])
def test_a_rank_that_only_waits_for_others_is_in_no_long_phase(
    page: SharedPage, clock: FakeClock, blocked: Blocked
) -> None:
    timeouts = in_long_phase(page, clock, blocked)
    page.waits = int(blocked != Blocked.COLLECTIVE)
    timeouts.all_idle = False
    assert passes(timeouts, 59) == []
    assert not timeouts.waiting
    timeouts.went_on = 0
    assert passes(timeouts, 500) == []
    assert timeouts.waiting, "it is counted, and another rank works"
    assert not timeouts.went_on, "it is counted once"
    timeouts.all_idle = True
    assert passes(timeouts, 1) == ["soft: no progress 560"]


@pytest.mark.parametrize("blocked", [Blocked.UNKNOWN, Blocked.ELSEWHERE, Blocked.WAITS])
def test_work_in_a_long_phase_is_no_hang_though_all_others_wait(
    page: SharedPage, clock: FakeClock, blocked: Blocked
) -> None:
    timeouts = in_long_phase(page, clock, blocked)
    assert passes(timeouts, 1700) == []
    assert not timeouts.waiting


def test_a_rank_that_waits_for_its_own_writer_works(page: SharedPage, clock: FakeClock) -> None:
    timeouts = in_long_phase(page, clock, Blocked.UNKNOWN)
    page.waits = page.works = 1
    assert passes(timeouts, 1200) == []
    page.works, page.worked = 0, clock.now()  # its files are written: it waits for other ranks
    assert passes(timeouts, 59) == []
    assert not timeouts.waiting
    assert passes(timeouts, 1) == ["soft: no progress 60"]


def test_a_rank_that_begins_to_work_is_counted_no_more(page: SharedPage, clock: FakeClock) -> None:
    timeouts = in_long_phase(page, clock, Blocked.UNKNOWN)
    page.waits, timeouts.all_idle = 1, False
    passes(timeouts, 100)
    assert timeouts.waiting
    page.works = 1  # all ranks have written their files: it commits
    passes(timeouts, 1)
    assert not timeouts.waiting


def test_a_large_message_on_its_way_is_work(page: SharedPage, clock: FakeClock) -> None:
    timeouts = in_long_phase(page, clock, Blocked.COLLECTIVE)
    timeouts.computes = True
    assert passes(timeouts, 500) == []
    timeouts.computes = False
    assert passes(timeouts, 60) == ["soft: no progress 60"]
