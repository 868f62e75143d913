"""The monitor process: a real fork that is small, detached, and ends when its work is done."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from inprocess.job_output import errors, events, said
from outlast.errors import StoreError
from outlast.inprocess.monitor import start
from procs import Job

Ranks = Callable[..., Job]

NET_S = 60.0
OWN_MEMORY = 30 << 20


def test_it_ends_after_its_main_process_was_killed(ranks: Ranks) -> None:
    with ranks("monitors", "watched", nprocs=1) as job:
        job.start_all()
        job.wait_for_line(0, said("beats"))
        (line,) = events(job, 0, "beats")
        monitor = psutil.Process(line["monitor"])
        assert line["closed"], "it holds a descriptor of its main process open"
        assert os.getsid(monitor.pid) == monitor.pid != os.getpgid(monitor.ppid())
        monitor.send_signal(signal.SIGINT)  # Ctrl-C is the main process's business
        assert monitor.memory_full_info().uss <= OWN_MEMORY
        assert monitor.is_running()
        job.kill(0)
        # No member is left to leave: nothing delays the end, not even serving the store.
        psutil.wait_procs([monitor], timeout=NET_S)
        assert not monitor.is_running() or monitor.status() == psutil.STATUS_ZOMBIE


def test_it_ends_when_it_is_dismissed_and_reports_nothing(ranks: Ranks) -> None:
    with ranks("monitors", "dismissed", nprocs=1) as job:
        job.start_all()
        assert job.wait_all() == {0: 0}, errors(job)
        (line,) = events(job, 0, "gone")
        assert not line["lost"]


def test_the_start_does_not_wait_for_one_that_serves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "fork_detached", lambda body, new_session: 12345)
    plan: Any = SimpleNamespace(serve=False, endpoint=("127.0.0.1", 1), logfile="")
    handle = start.start_monitor(plan)
    handle.socket.close()
    assert (handle.pid, handle.endpoint) == (12345, plan.endpoint)


def test_a_log_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    logfile = str(tmp_path / "none" / "monitor-{rank}.log")
    plan: Any = SimpleNamespace(serve=False, endpoint=None, logfile=logfile, rank=3)
    with pytest.raises(StoreError, match="none/monitor-3"):
        start.start_monitor(plan)
