"""The values of the instruments while a run is written, event by event."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from events.synthetic_run import SyntheticRun
from metrics.replay import Logs, eventful_run
from outlast.events.emitter import JsonlSink
from outlast.events.report import Restart, build
from outlast.events.types import Entered, Fault, LauncherEnded, NothingToRestore, Seen
from outlast.inprocess.monitor.shared_page import SharedPage
from outlast.metrics import collect
from outlast.metrics.collect import (
    INSTRUMENTS,
    Collector,
    Instrument,
    Kind,
    Labels,
    Listener,
    time_states,
)
from outlast.metrics.live_run import LiveRun


class Heard(Listener):
    """Remembers what a collector finds."""

    def __init__(self, collector: Collector) -> None:
        collector.listeners.append(self)
        self.seconds: dict[tuple[str, ...], list[float]] = {}
        self.restarts = 0

    def observed(self, instrument: Instrument, labels: Labels, seconds: float) -> None:
        self.seconds.setdefault((instrument.name, *labels), []).append(seconds)

    def restarted(self, restart: Restart) -> None:
        self.restarts += 1


def collector(folder: Path, alive: bool = True) -> Collector:
    return Collector(LiveRun(folder, alive=lambda: alive))


@pytest.fixture(autouse=True)
def _every_report_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outlast.metrics.live_run._PAUSE_FACTOR", -1)


def test_counters_never_decrease_and_end_as_the_report_says(tmp_path: Path) -> None:
    events, logs = eventful_run(), Logs(tmp_path / "run")
    metrics, before = collector(logs.folder), {}
    fell_back = False
    for number, event in enumerate(events, start=1):
        logs.write([event])
        values = metrics.values()
        now = {
            (instrument, labels): value
            for instrument, series in values.items()
            if instrument.kind is Kind.COUNTER
            for labels, value in series.items()
        }
        for key, value in before.items():
            assert now[key] >= value, (key, event)
        before = now
        for host in build(events[:number]).hosts:
            fell_back |= time_states(host)["productive"] < now[collect.TIME, ("a", "productive")]
    assert fell_back  # the report took time back that had counted as productive: redone work
    for host in build(events).hosts:
        for state, seconds in time_states(host).items():
            assert before[collect.TIME, (host.host, state)] == pytest.approx(seconds)
    assert before[collect.STEPS_REDONE, ()] == 30


def test_restarts_count_by_the_kind_of_their_first_fault(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "run")
    logs.write(eventful_run())
    metrics = collector(logs.folder, alive=False)
    heard = Heard(metrics)
    values = metrics.values()
    assert values[collect.RESTARTS] == {("exception",): 1.0, ("terminated",): 1.0}
    for phase in ("total", "detect", "abort"):
        assert len(heard.seconds["outlast_recovery_seconds", phase]) == 2
    assert heard.seconds["outlast_checkpoint_blocked_seconds",] == [0.25] * 3
    metrics.values()
    assert heard.restarts == 2, "each once"


def test_a_restart_counts_once_the_job_is_in_the_function_again(tmp_path: Path) -> None:
    events, logs = eventful_run(), Logs(tmp_path / "run")
    metrics = collector(logs.folder)
    heard = Heard(metrics)
    first = next(i for i, event in enumerate(events) if isinstance(event, Fault | Seen))
    back = next(i for i, event in enumerate(events) if event.kind == "entered" and event.iteration)
    logs.write(events[:back])
    assert back > first
    assert metrics.values()[collect.RESTARTS] == {}
    logs.write(event for event in events[back:] if event.time < 115)
    assert metrics.values()[collect.RESTARTS] == {("exception",): 1.0}
    metrics.poll()
    assert heard.restarts == 1


def test_a_cause_is_never_a_message(tmp_path: Path) -> None:
    events, logs = eventful_run(), Logs(tmp_path / "run")
    logs.write(events)
    values = collector(logs.folder, alive=False).values()
    for instrument, series in values.items():
        for labels in series:
            assert len(labels) == len(instrument.labels)
            assert "bad batch" not in " ".join(labels)


def test_another_hosts_fault_is_elsewhere(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "run")
    events = [e for e in eventful_run() if not (isinstance(e, Fault) and e.iteration == 0)]
    logs.write(events)
    values = collector(logs.folder, alive=False).values()
    assert values[collect.RESTARTS] == {("elsewhere",): 1.0, ("terminated",): 1.0}


def test_members_and_the_newest_checkpoint(tmp_path: Path) -> None:
    events, logs = eventful_run(), Logs(tmp_path / "run")
    logs.write(event for event in events if event.time < 140.5)
    run = LiveRun(logs.folder, alive=lambda: True, clock=lambda: 145.0)
    run.own_host = "a"
    numbers = Collector(run).values()
    members = {state: value for (_, state), value in numbers[collect.MEMBERS].items()}
    assert members == {"active": 3, "restarting": 0, "reserve": 0, "joining": 0}
    assert numbers[collect.MEMBERS_LOST] == {("a",): 1}
    assert numbers[collect.CHECKPOINT_AGE] == {(): 145.0 - 104.5}
    assert numbers[collect.CHECKPOINT_STEP] == {(): 40}
    assert numbers[collect.STEP] == {(): 100}


def test_a_step_is_seen_before_it_is_recorded(tmp_path: Path) -> None:
    logs, page = Logs(tmp_path / "run"), SharedPage()
    try:
        page.step = 33
        run = LiveRun(logs.folder, alive=lambda: True)
        place = {"host": run.own_host, "pid": os.getpid(), "time": time.monotonic()}
        logs.write([Entered(rank=0, member=0, iteration=0, **place)])  # type: ignore[arg-type]
        logs.write([NothingToRestore(rank=0, **place)])  # type: ignore[arg-type]
        assert Collector(run).values()[collect.STEP] == {(): 33}
    finally:
        page.close()


def test_time_goes_on_between_two_events_while_the_run_lives(tmp_path: Path) -> None:
    events, logs = eventful_run(), Logs(tmp_path / "run")
    logs.write(event for event in events if event.time < 140.5)
    for alive, wall in ((True, 400.0), (False, 40.0)):
        run = LiveRun(logs.folder, alive=lambda alive=alive: alive, clock=lambda: 500.0)
        run.own_host = "a"
        run.poll()
        assert run.report().hosts[0].wall_seconds == wall


def test_a_run_without_events_has_no_times(tmp_path: Path) -> None:
    numbers = collector(tmp_path, alive=False).values()
    assert numbers[collect.TIME] == {}
    assert collect.CHECKPOINT_AGE not in numbers


def test_any_beginning_of_the_logs_can_be_read(tmp_path: Path) -> None:
    """Logs are not read at the same moment: each ends where it happens to."""
    events = eventful_run()
    processes = sorted({event.pid for event in events})
    for ahead in processes:
        for cut in range(0, len(events), 25):
            folder = tmp_path / f"{ahead}-{cut}"
            seen = [e for i, e in enumerate(events) if i < cut or e.pid == ahead]
            folder.mkdir()
            for pid in processes:
                sink = JsonlSink(folder / f"{pid}.jsonl")
                for event in seen:
                    if event.pid == pid:
                        sink.write(event)
                sink.close()
            collector(folder).values()


def test_names() -> None:
    assert len({each.prometheus_name for each in INSTRUMENTS}) == len(INSTRUMENTS)
    assert collect.TIME.prometheus_name == "outlast_time_seconds_total"
    assert collect.TIME.opentelemetry_name == "outlast.time"


def test_a_fault_that_ends_the_job_is_no_restart(tmp_path: Path) -> None:
    run, logs = SyntheticRun(hosts=["a", "a"]), Logs(tmp_path / "run")
    run.begin(at=100.0)
    run.fault(1, at=110.0)
    logs.write([*run.events, LauncherEnded(host="a", pid=1, time=111.0, exit_code=93)])
    metrics = collector(logs.folder, alive=False)
    heard = Heard(metrics)
    assert metrics.values()[collect.RESTARTS] == {}
    assert heard.restarts == 1, "its trace is sent"
