"""The frames of `outlast top`."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from events.synthetic_run import SyntheticRun
from metrics.replay import Logs, eventful_run
from outlast.events.event import Event
from outlast.events.types import (
    Entered,
    Fault,
    HostLeaving,
    HostLost,
    LauncherEnded,
    Lost,
    StopRequested,
    WorkerExited,
    WorkerStarted,
)
from outlast.inprocess.monitor.shared_page import SharedPage
from outlast.metrics.live_run import LiveRun
from outlast.metrics.screen import Screen


def frame(folder: Path, *, alive: bool, height: int | None = None, now: float = 145.0) -> str:
    run = LiveRun(folder, alive=lambda: alive, clock=lambda: now)
    run.own_host = "a"
    run.poll()
    console = Console(width=160)
    with console.capture() as capture:
        console.print(Screen(run).frame(height))
    return capture.get()


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path / "run")


def running() -> list[Event]:
    return [event for event in eventful_run() if event.time < 140.5]


def test_a_running_job(logs: Logs) -> None:
    logs.write(running())
    lines = frame(logs.folder, alive=True).splitlines()
    assert lines[0].startswith("run  running · 45.00 s · goodput ")
    assert "2 restarts: 1 x ValueError (rank 1), 1 x died (rank 2)" in lines[0]
    assert "3 active · 0 reserve · 0 joining · 0 restarting · 1 lost so far · 1 host" in lines[1]
    assert " ".join(lines[3].split()) == (
        "rank state host pid restarts step steps/s CPU/step progress"
    )
    assert " ".join(lines[4].split()) == "0 running a 1000 2 100 3.33 20.0 ms 5.00 s ago"
    assert [line.split()[0] for line in lines[4:7]] == ["0", "1", "2"]
    text = "\n".join(lines)
    assert "last fault  Rank 2 (pid 1002, host a) died: main process ended; 24.00 s ago" in text
    assert "20 steps redone" in text
    assert "checkpoints newest: step 40, 1.0 MB, 40.50 s old; 1 committed, 0 failed" in text
    assert "steps done again" in text


def test_the_slow_rank_is_the_one_that_uses_the_cpu(logs: Logs) -> None:
    page = SharedPage()
    try:
        page.step, page.function_thread = 10, threading.get_native_id()
        run = LiveRun(logs.folder, alive=lambda: True)
        place = {"host": run.own_host, "pid": os.getpid(), "time": time.monotonic()}
        logs.write([Entered(rank=0, member=0, iteration=0, **place)])  # type: ignore[arg-type]
        run.poll()
        (process,) = run.state.current
        screen = Screen(run)
        assert screen._progress(process)[2] is None
        before = time.thread_time()
        while time.thread_time() < before + 0.1:
            pass
        page.step = 20
        cpu = screen._progress(process)[2]
        assert cpu is not None
        spent = time.thread_time() - before
        assert 0.5 * spent / 10 < cpu < 2 * spent / 10  # Linux counts it in ticks
        again = screen._progress(process)[2]  # no step since: still that of the last ones
        assert again is not None
        assert cpu <= again < 2 * (time.thread_time() - before) / 10
    finally:
        page.close()


def test_a_finished_run_says_so(logs: Logs) -> None:
    launcher = {"host": "a", "pid": 1}
    logs.write(eventful_run())
    logs.write([WorkerStarted(worker_pid=1000, rank=0, time=99.0, **launcher)])  # type: ignore[arg-type]
    logs.write([LauncherEnded(exit_code=0, time=142.0, **launcher)])  # type: ignore[arg-type]
    text = frame(logs.folder, alive=True)
    assert text.startswith("run  finished")
    assert "completed" in text
    logs.write([LauncherEnded(exit_code=93, time=143.0, **launcher)])  # type: ignore[arg-type]
    assert frame(logs.folder, alive=True).startswith("run  ended with exit code 93")


def test_a_run_whose_processes_are_gone(logs: Logs) -> None:
    logs.write(running())
    text = frame(logs.folder, alive=False, now=300.0)
    assert text.startswith("run  ended: its processes no longer exist")
    text = frame(logs.folder, alive=False)  # another launcher may be about to start new ones
    assert text.startswith("run  no process on this host at present")


def test_a_rank_that_leaves_at_a_stop_is_not_lost(logs: Logs) -> None:
    logs.write(running())
    logs.write([StopRequested(host="a", pid=1, time=139.5, reason="SIGTERM to the launcher")])
    lost = Lost(host="a", pid=5000, member=0, rank=0, iteration=2, time=139.8, reason="ended")
    logs.write([lost])
    text = frame(logs.folder, alive=True)
    assert "told to stop: SIGTERM to the launcher" in text
    assert "1 lost so far" in text  # the rank that was killed before


def test_an_orderly_stop_is_stopping_until_it_has_stopped(logs: Logs) -> None:
    logs.write(running())
    started = {"host": "a", "pid": 1, "worker_pid": 1000, "rank": 0, "time": 99.0}
    logs.write([WorkerStarted(**started)])  # type: ignore[arg-type]
    assert frame(logs.folder, alive=True).startswith("run  running")
    logs.write([StopRequested(host="a", pid=1, time=139.5, reason="SIGTERM to the launcher")])
    assert frame(logs.folder, alive=True).startswith("run  stopping")
    logs.write([LauncherEnded(host="a", pid=1, exit_code=143, time=142.0)])
    assert frame(logs.folder, alive=True).startswith("run  stopped, with exit code 143")


def test_ranks_that_ended_at_a_stop_have_not_completed(logs: Logs) -> None:
    logs.write(running())
    logs.write([StopRequested(host="a", pid=1, time=139.5, reason="SIGINT to the launcher")])
    for pid in (1000, 1001, 1003):
        logs.write([WorkerExited(host="a", pid=1, worker_pid=pid, exit_code=143, time=140.0)])
    text = frame(logs.folder, alive=True)
    assert "3 ended" in text
    assert "completed" not in text


def test_a_host_that_is_to_leave_is_shown_until_it_has_left(logs: Logs) -> None:
    logs.write(running())
    h2 = {"host_id": "h2-1", "name": "h2"}
    logs.write([HostLeaving(**h2, reason="SIGTERM", host="a", time=140.6)])
    assert "leaving: h2, waits for a host" in frame(logs.folder, alive=True)
    logs.write([HostLeaving(**h2, to="h4", host="a", time=140.7)])
    assert "leaving: h2 to h4" in frame(logs.folder, alive=True)
    logs.write([HostLost(**h2, left=True, host="a", time=140.8)])
    assert "leaving" not in frame(logs.folder, alive=True)
    logs.write([HostLeaving(**h2, host="a", time=140.9)])
    logs.write([HostLeaving(**h2, stays=True, host="a", time=141.0)])
    assert "leaving" not in frame(logs.folder, alive=True)


def test_the_last_fault_is_a_hang_also_if_it_was_ended_by_a_signal(logs: Logs) -> None:
    run = SyntheticRun(("a",) * 3, {"a": 100.0})
    run.begin(0.0)
    hung = Fault(interruption="HARD_TIMEOUT", cause="no progress for 90 s", idle=4.0)
    run.write(1, hung, 20.0, monitor=True)
    run.restart(21.0, lost=[1], joiners=["a"])
    logs.write(run.events)
    logs.write([WorkerExited(host="a", pid=1, worker_pid=1001, exit_code=-9, time=121.0)])
    text = frame(logs.folder, alive=True)
    assert "Rank 1 (pid 1001, host a) hung and was terminated: no progress for 90 s; " in text
    assert "SIGKILL" not in text


def test_a_stopped_process_is_shown_as_such(logs: Logs) -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        entered = [dataclasses.replace(e, pid=process.pid) for e in running() if e.pid == 1000]
        logs.write([*entered, *(e for e in running() if e.pid != 1000)])
        row = f"a {process.pid} "
        assert f"0 running {row}" in " ".join(frame(logs.folder, alive=True).split())
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert f"0 stopped {row}" in " ".join(frame(logs.folder, alive=True).split())
    finally:
        process.kill()
        process.wait()


def test_a_script_without_wrapper(logs: Logs) -> None:
    for pid in (11, 12):
        logs.write([WorkerStarted(host="a", pid=1, rank=pid - 11, worker_pid=pid, time=100.0)])
    logs.write([WorkerExited(host="a", pid=1, rank=1, worker_pid=12, exit_code=-9, time=120.0)])
    text = frame(logs.folder, alive=True)
    assert "1 lost so far" in text
    assert "0 starting" in " ".join(text.split())


def test_ranks_that_do_not_fit_are_summed_up(logs: Logs) -> None:
    logs.write(running())
    text = frame(logs.folder, alive=True, height=0)
    assert "more:" not in text
    for number in range(20):
        started = WorkerStarted(host="a", pid=1, rank=10 + number, worker_pid=number, time=130.0)
        logs.write([started])
    text = frame(logs.folder, alive=True, height=24)
    assert "and 13 more: 10 starting, 3 running" in text


def test_text_of_a_log_cannot_control_the_terminal(logs: Logs) -> None:
    logs.write(running())
    evil = "\x1b]0;owned\x07"
    logs.write([HostLost(host="a", pid=1, host_id="h", name=evil, time=139.0)])
    assert "\x1b" not in frame(logs.folder, alive=True)


def test_the_name_of_a_host_is_no_markup(logs: Logs) -> None:
    logs.write([dataclasses.replace(event, host="[b]") for event in running()])
    assert "[b]" in frame(logs.folder, alive=True)


def test_a_run_without_events(tmp_path: Path) -> None:
    assert "no events yet" in frame(tmp_path, alive=True)
