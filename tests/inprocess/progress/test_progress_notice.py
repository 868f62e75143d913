"""The line about a rank without progress: once for each hang, and from the rank that hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fake_clock import FakeClock
from outlast.inprocess.monitor.shared_page import Activity, SharedPage
from outlast.inprocess.monitor.timeouts import FrozenNotice
from outlast.inprocess.recovery.monitor_supervisor import ProgressNotice
from outlast.inprocess.timeouts import Timeouts


class Rig:
    def __init__(self, page: SharedPage) -> None:
        self.page, self.clock, self.said = page, FakeClock(), list[str]()
        self.waits = False
        interrupter: Any = SimpleNamespace(
            user_place=lambda: "train.py:42 in step", waits_for_others=lambda: self.waits
        )
        self.notice = ProgressNotice(page, interrupter, self.clock, "node1", 60.0, self.said.append)
        page.activity, page.rank = Activity.FUNCTION, 1
        self.clock.advance(100)
        page.progress = self.clock.now()

    def after(self, seconds: float) -> list[str]:
        self.clock.advance(seconds)
        self.notice.check()
        said, self.said[:] = list(self.said), []
        return said


@pytest.fixture
def rig(page: SharedPage) -> Rig:
    return Rig(page)


def test_it_is_said_once_for_each_hang_and_says_where(rig: Rig) -> None:
    assert rig.after(9) == []
    where = "at train.py:42 in step; all ranks restart after 60 s"
    assert rig.after(2) == [f"rank 1 on node1: no progress for 11 s, {where}"]
    assert rig.after(30) == []


def test_steps_that_take_long_are_not_reported_each_time(rig: Rig) -> None:
    assert len(rig.after(11)) == 1
    for _ in range(3):
        rig.clock.advance(19)
        rig.page.progress = rig.clock.now()  # a step of 30 s
        assert rig.after(30) == []
    assert len(rig.after(31)) == 1  # more than twice as long


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_of_ranks_that_wait_for_others_only_rank_0_says_it(rig: Rig, rank: int, lines: int) -> None:
    rig.waits, rig.page.rank = True, rank
    said = rig.after(11)
    assert len(said) == lines
    assert all("has waited for other ranks for 11 s" in line for line in said)


def test_nothing_is_said_outside_the_function_or_in_a_long_phase(rig: Rig) -> None:
    rig.page.activity = Activity.WAITING
    assert rig.after(50) == []
    rig.page.activity = Activity.FUNCTION
    rig.page.long_limit = -1.0
    assert rig.after(50) == []


@pytest.mark.parametrize("began", [True, False], ids=["later", "before the first heartbeat"])
def test_the_monitor_process_speaks_for_a_stopped_process(page: SharedPage, began: bool) -> None:
    clock = FakeClock()
    clock.advance(100)
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    plan: Any = SimpleNamespace(page=page, durations=Timeouts().in_seconds())
    notice = FrozenNotice(plan, process.pid, clock, "node1")
    page.activity, page.rank, page.progress = Activity.FUNCTION, 1, clock.now()
    page.heartbeat = clock.now() if began else 0.0
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    for seconds in (9, 2, 30):
        clock.advance(seconds)
        notice.check()
    process.kill()
    _, errors = process.communicate()
    assert errors.decode() == (
        f"rank 1 on node1: no progress for 11 s: process {process.pid} is stopped (SIGSTOP); "
        "after 90 s it is ended\n"
    )


def test_a_stopped_process_is_ended_after_the_timeout_in_force(
    page: SharedPage, tmp_path: Path
) -> None:
    clock = FakeClock()
    clock.advance(100)
    with (tmp_path / "errors").open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=file
        )
    plan: Any = SimpleNamespace(page=page, durations=Timeouts().in_seconds())
    page.activity, page.rank, page.heartbeat = Activity.FUNCTION, 1, clock.now()
    page.soft_limit = 2.0  # learned from the pings
    clock.advance(11)
    FrozenNotice(plan, process.pid, clock, "node1").check()
    process.kill()
    process.communicate()
    assert (tmp_path / "errors").read_text().endswith("after 20 s it is ended\n")


def test_a_file_at_a_position_of_the_processs_own_is_left_alone(
    page: SharedPage, tmp_path: Path
) -> None:
    clock = FakeClock()
    clock.advance(100)
    for mode, expected in (("wb", b""), ("ab", b"rank 1 ")):
        with (tmp_path / mode).open(mode) as file:  # type: ignore[call-overload]
            process = subprocess.Popen(
                [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=file
            )
        plan: Any = SimpleNamespace(page=page, durations=Timeouts().in_seconds())
        notice = FrozenNotice(plan, process.pid, clock, "node1")
        page.activity, page.rank, page.heartbeat = Activity.FUNCTION, 1, clock.now()
        clock.advance(11)
        notice.check()
        process.kill()
        process.communicate()
        assert (tmp_path / mode).read_bytes()[:7] == expected
