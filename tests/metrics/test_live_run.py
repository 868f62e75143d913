"""Whether a run goes on, and how new its report is."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from metrics.replay import Logs, eventful_run
from outlast.events.event import Event
from outlast.events.types import (
    Completed,
    Entered,
    Joined,
    LauncherEnded,
    LeftFunction,
    Lost,
    Seen,
    StopRequested,
    WorkerStarted,
)
from outlast.metrics import collect
from outlast.metrics.collect import Collector
from outlast.metrics.live_run import LiveRun
from outlast.metrics.run_state import RunState, State


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path / "run")


def run_of(logs: Logs, now: float | None = None, *, alive: bool | None = None) -> LiveRun:
    clock = time.monotonic if now is None else lambda: now
    run = LiveRun(logs.folder, alive=None if alive is None else lambda: alive, clock=clock)
    if alive is not None:
        run.own_host = "a"
    run.poll()
    return run


def test_a_process_that_exists_and_one_that_does_not(logs: Logs) -> None:
    run = run_of(logs)
    host, now = run.own_host, time.monotonic()
    logs.write([WorkerStarted(host=host, pid=os.getpid(), rank=0, worker_pid=1, time=now)])
    run.poll()
    assert run.alive()
    assert not run.over()
    logs.write([LauncherEnded(host=host, pid=os.getpid(), exit_code=0, time=now)])
    run.poll()
    assert run.over()


def test_a_later_process_with_the_same_id_is_another(logs: Logs) -> None:
    run = run_of(logs)
    started = WorkerStarted(host=run.own_host, pid=os.getpid(), rank=0, worker_pid=1, time=1.0)
    logs.write([started])
    run.poll()
    assert not run.alive()
    assert run.over()


def test_a_launcher_that_writes_no_events_may_start_new_processes(logs: Logs) -> None:
    logs.write(eventful_run())
    last = run_of(logs, 0.0, alive=False).state.now["a"]
    assert not run_of(logs, last + 100, alive=False).over()
    assert run_of(logs, last + 130, alive=False).over()
    assert run_of(logs, last - 1, alive=False).over()  # the machine was started again


def test_other_hosts_may_go_on(logs: Logs) -> None:
    logs.write(eventful_run("elsewhere"))
    assert not run_of(logs).over()


def test_the_last_report_is_of_all_events(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outlast.metrics.live_run._PAUSE_FACTOR", 1e9)
    events = eventful_run()
    logs.write(events[:40])
    run = LiveRun(logs.folder, alive=lambda: True)
    collector = Collector(run)
    collector.poll()
    first = run.report()
    logs.write(events[40:])
    collector.poll()
    assert run.report() is first  # a report takes time
    logs.write([WorkerStarted(host="a", pid=1, rank=0, worker_pid=1000, time=99.0)])
    logs.write([LauncherEnded(host="a", pid=1, time=142.0)])
    restarts = collector.values()[collect.RESTARTS]
    assert restarts == {("exception",): 1.0, ("terminated",): 1.0}


def test_records_of_steps_do_not_pile_up(logs: Logs) -> None:
    events = eventful_run()
    steps = [event for event in events if event.kind == "steps_done"]
    logs.write(events)
    one = run_of(logs, 0.0, alive=False)
    logs.write(steps * 50)
    many = run_of(logs, 0.0, alive=False)
    assert many.report() == one.report()


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], State.RUNNING),
        ([Entered(active=False)], State.RESERVE),
        ([Joined()], State.WAITING),
        ([Seen()], State.RESTARTING),
        ([LeftFunction(outcome="raised")], State.RESTARTING),
        ([LeftFunction(outcome="returned")], State.RETURNED),
        ([Completed()], State.COMPLETED),
        ([Lost()], State.LOST),
        ([StopRequested(reason="SIGTERM"), Lost()], State.ENDED),
    ],
)
def test_what_a_process_does_after_its_events(events: list[Event], state: State) -> None:
    run = RunState()
    for event in [Entered(), *events]:
        run.apply(dataclasses.replace(event, host="a", pid=1, member=0))
    assert [process.state for process in run.processes.values()] == [state]
