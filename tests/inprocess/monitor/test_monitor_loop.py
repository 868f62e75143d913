"""The event loop of the monitor process, in a thread, with this test's parent as main process."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fake_clock import FakeClock
from outlast.inprocess.monitor import loop as loop_module
from outlast.inprocess.monitor.loop import MonitorLoop
from outlast.inprocess.monitor.reports import MonitorPlan
from outlast.inprocess.monitor.shared_page import Activity, SharedPage
from outlast.inprocess.store import FileStore
from outlast.inprocess.timeouts import Timeouts


class BusyStore(FileStore):
    """A store that cannot be reached at first."""

    failures = 3

    def __init__(self, file_name: str) -> None:
        if BusyStore.failures:
            BusyStore.failures -= 1
            raise RuntimeError("not yet")
        super().__init__(file_name)


def plan(page: SharedPage, file: Path) -> MonitorPlan:
    return MonitorPlan(
        page=page,
        factory=BusyStore,
        kwargs={"file_name": str(file)},
        endpoint=None,
        serve=False,
        ready="",
        prefix="call/",
        rank=0,
        world_size=1,
        token="token",
        durations=dataclasses.replace(
            Timeouts().in_seconds(),
            monitor_interval=0.01,
            heartbeat=30.0,
            soft=0.0,
            hard=0.0,
            ping=0.0,
            grace=1.0,
            barrier=60.0,
        ),
        logfile=None,
        events_dir="",
    )


def test_a_message_of_the_main_process_does_not_end_the_attempts_to_reach_the_store(
    tmp_path: Path,
) -> None:
    # A monitor without a store is silent: the others would take its rank for lost.
    page = SharedPage()
    page.member, page.rank, page.iteration = 0, 0, 0
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.send(b"T")
        loop = MonitorLoop(plan(page, tmp_path / "store"), os.getppid(), theirs, None)
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            deadline = time.monotonic() + 60.0
            store = FileStore(str(tmp_path / "store"))
            while not store.check(["call/beat/0"]) and thread.is_alive():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert store.check(["call/beat/0"])
        finally:
            ours.send(b"B")
            thread.join()
    page.close()


@pytest.mark.parametrize("activity", [Activity.WAITING, Activity.FUNCTION])
def test_a_pause_of_all_processes_does_not_count_as_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, activity: Activity
) -> None:
    """A container that is paused, or a job that a scheduler suspends, goes on as it was."""
    clock, page = FakeClock(1000.0), SharedPage()
    monkeypatch.setattr(loop_module, "MonotonicClock", lambda: clock)
    page.iteration, page.heartbeat = 0, clock.now()
    page.enter(activity, clock.now())

    def paused(timeout_ms: float) -> list[tuple[int, int]]:
        clock.advance(500.0)
        return []

    ours, theirs = socket.socketpair()
    with ours, theirs:
        own = plan(page, tmp_path / "store")
        durations = dataclasses.replace(own.durations, soft=60.0, hard=90.0)
        own = dataclasses.replace(own, durations=durations)
        loop = MonitorLoop(own, os.getppid(), theirs, None)
        loop._poll = SimpleNamespace(poll=paused)  # type: ignore[assignment]
        loop._wait()
        limit = 90.0 if activity is Activity.WAITING else 60.0
        assert loop._timeouts.next_check() == clock.now() + limit
        assert loop._ring._changed_at == clock.now()
        assert loop._pidfd is not None
        os.close(loop._pidfd)
    page.close()
