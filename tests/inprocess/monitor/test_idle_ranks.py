"""Whether all ranks wait, with a real store and several ranks; CPU time of real processes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from fake_clock import FakeClock
from outlast.clock import MonotonicClock
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link, drive, perform_on
from outlast.coordination.stores.store import MemoryStore
from outlast.inprocess.monitor import cpu_time
from outlast.inprocess.monitor.cpu_time import CpuTime
from outlast.inprocess.monitor.timeouts import IdleRanks

SIZE = 3
CONFIRM_S, AGAIN_S = 3.0, 60.0


class Ranks:
    """`SIZE` ranks in iteration 0."""

    def __init__(self) -> None:
        self.clock, store = FakeClock(), MemoryStore()
        self.membership = MembershipProtocol(Link("call/"), SIZE)
        self.perform = perform_on(store)
        access: Any = SimpleNamespace(
            membership=self.membership, perform=lambda work: drive(work, self.perform)
        )
        self.pages: list[Any] = [SimpleNamespace(iteration=0, world_size=SIZE) for _ in range(SIZE)]
        self.ranks = [
            IdleRanks(page, access, self.clock, CONFIRM_S, AGAIN_S) for page in self.pages
        ]

    def wait(self, *ranks: int) -> list[bool]:
        return [self.ranks[rank].wait() for rank in ranks]


def test_the_last_one_to_wait_reports_it_once_and_a_little_later() -> None:
    job = Ranks()
    assert job.wait(0, 1, 0, 1) == [False] * 4
    job.clock.advance(1000)
    assert job.wait(0, 1, 2) == [False] * 3
    job.clock.advance(CONFIRM_S)
    assert job.wait(0, 1, 2, 2) == [False, False, True, False]


def test_a_rank_that_goes_on_meanwhile_is_at_work() -> None:
    job = Ranks()
    job.wait(0, 1, 2)
    job.ranks[0].go_on()  # it was woken just before the last one was counted
    job.clock.advance(CONFIRM_S)
    assert job.wait(1, 2) == [False, False]
    assert job.wait(0) == [False]  # it waits again, and is the last one now
    job.clock.advance(CONFIRM_S)
    assert job.wait(1, 2, 0) == [False, False, True]


def test_a_rank_that_has_returned_waits_too() -> None:
    job = Ranks()
    drive(job.membership.finish(0, SIZE), job.perform)
    job.wait(1, 2)
    job.clock.advance(CONFIRM_S)
    assert job.wait(1, 2) == [False, True]


def test_a_rank_that_returns_last_makes_the_others_look_again() -> None:
    job = Ranks()
    job.wait(1, 2)
    drive(job.membership.finish(0, SIZE), job.perform)
    job.clock.advance(CONFIRM_S)
    assert job.wait(1, 2) == [False, False]
    job.clock.advance(AGAIN_S)
    assert job.wait(1, 2) == [False, False]  # found complete now, and to be confirmed
    job.clock.advance(CONFIRM_S)
    assert job.wait(1, 2) == [True, True]


def test_each_iteration_counts_anew() -> None:
    job = Ranks()
    job.wait(0, 1)
    for page in job.pages:
        page.iteration = 1
    job.ranks[0].go_on()  # in the iteration before: nothing to take back
    job.wait(2)
    job.clock.advance(CONFIRM_S)
    assert job.wait(2) == [False]


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> CpuTime:
    monkeypatch.setattr(cpu_time, "_SAMPLE_S", 0.05)
    return CpuTime(os.getpid(), MonotonicClock())


def _progresses(cpu: CpuTime, **counts: bool) -> None:
    """Returns once CPU time was seen."""
    while not cpu.progress:
        cpu.sample(threading.get_native_id(), **counts)
        threading.Event().wait(0.02)


def test_a_computing_child_is_seen(cpu: CpuTime) -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        _progresses(cpu, own=False, children=True)
        child.kill()


def test_a_computing_thread_is_seen(cpu: CpuTime) -> None:
    while not cpu.progress:
        cpu.sample(threading.get_native_id(), own=True, children=False)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 20_000)


def test_who_sleeps_is_not_seen(cpu: CpuTime) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        for _ in range(30):
            cpu.sample(threading.get_native_id(), own=False, children=False)
            threading.Event().wait(0.02)
        child.kill()
    assert not cpu.progress


def test_a_pause_of_the_whole_machine_is_no_silence() -> None:
    clock = FakeClock()
    cpu = CpuTime(1 << 30, clock)  # no process: it uses nothing

    def progress_after(pause_s: float) -> float:
        clock.advance(pause_s)
        cpu.sample(0, own=True, children=False, every=0.05)
        return cpu.progress

    assert progress_after(100) == clock.now()
    assert progress_after(0.06) == progress_after(0.1) == 100
    assert progress_after(0.6) == clock.now()


def test_who_waits_for_a_core_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_time, "_SAMPLE_S", 0.05)
    core = min(os.sched_getaffinity(0))
    loop = f"import os; os.sched_setaffinity(0, [{core}]); os.sched_setscheduler(0, {{}}, "
    loop += "os.sched_param(0))\nwhile True: pass"
    first, last = (
        subprocess.Popen([sys.executable, "-c", loop.format(f"os.{policy}")])
        for policy in ("SCHED_OTHER", "SCHED_IDLE")
    )
    with first, last:
        try:
            cpu = CpuTime(last.pid, MonotonicClock())
            while not cpu.progress:
                cpu.sample(0, own=False, children=False, queued=True)
                threading.Event().wait(0.02)
        finally:
            first.kill()
            last.kill()
