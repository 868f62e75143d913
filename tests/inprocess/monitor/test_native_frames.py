"""A rank that is blocked in native code and holds the GIL: its monitor process says where, once it
is about to terminate it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from inprocess.job_output import errors, full, views
from outlast.events.report import load
from outlast.events.types import Fault
from outlast.inprocess.monitor.native_frames import frames_of
from procs import Job

Ranks = Callable[..., Job]
HOST = socket.gethostname()
WITH_PY_SPY = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def lines_of(folder: Path) -> list[str]:
    """What the monitor processes have logged about native frames."""
    logs = [file.read_text() for file in folder.glob("monitor*.log")]
    return [line for log in logs for line in log.splitlines() if "native frames" in line]


@pytest.fixture
def _ptrace_is_allowed() -> None:
    """Of a process that is no child of the tracing one."""
    command = shutil.which("py-spy", path=WITH_PY_SPY)
    assert command, "the extra `dev` has py-spy"
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        dump = [command, "dump", "--native", "--pid", str(process.pid)]
        found = subprocess.run(dump, capture_output=True, text=True, timeout=60, check=False)
    if found.returncode:
        pytest.skip(f"py-spy: {found.stderr.strip()}")


@pytest.mark.slow
@pytest.mark.usefixtures("_ptrace_is_allowed")
def test_the_native_frames_of_a_blocked_rank_are_said(ranks: Ranks, tmp_path: Path) -> None:
    env = {"OUTLAST_EVENTS_DIR": str(tmp_path), "PATH": WITH_PY_SPY}
    with ranks("lost", "holds_the_gil", str(tmp_path), nprocs=2, env=env) as job:
        job.start_all()
        pid = job.pid(1)
        assert job.wait_all()[0] == 0, errors(job)
        assert views(job) == {0: full(2), 1: full(1)}
    (said,) = lines_of(tmp_path)
    assert f"rank 1 on {HOST}: the native frames of process {pid} are " in said
    assert "pthread_mutex_lock (libc.so.6)" in said
    assert " < _lock_twice (lost.py:" in said
    traces = [each.traceback for each in load(tmp_path) if isinstance(each, Fault) and each.rank]
    assert sum(trace in said for trace in traces if trace) == 1


@pytest.mark.slow
def test_no_rank_is_read_that_is_not_terminated(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "py-spy"
    file.write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n")
    file.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with ranks("lost", "one_hangs", "python", "pings", nprocs=2, env=env) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
    assert not (tmp_path / "called").exists()


@pytest.mark.slow
def test_what_py_spy_cannot_do_is_said_in_one_line(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "py-spy"
    file.write_text("#!/bin/sh\necho Permission Denied. >&2\necho more >&2\nexit 1\n")
    file.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with ranks("lost", "holds_the_gil", str(tmp_path), nprocs=2, env=env) as job:
        job.start_all()
        assert job.wait_all()[0] == 0, errors(job)
    (said,) = lines_of(tmp_path)
    assert said.endswith("are not known: py-spy: Permission Denied.")


def test_the_frames_are_those_of_the_thread_that_holds_the_gil() -> None:
    def thread(number: int, *, gil: bool) -> dict[str, object]:
        place = {"short_filename": "libc.so.6", "filename": "/lib/libc.so.6", "line": number}
        return {
            "os_thread_id": number,
            "owns_gil": gil,
            "frames": [{"name": f"wait{number}", **place}, {"name": "f", **place, "line": 0}],
        }

    dump = [thread(1, gil=False), thread(2, gil=True), thread(3, gil=False)]
    assert frames_of(json.dumps(dump), 3) == ["wait2 (libc.so.6:2)", "f (libc.so.6)"]
    dump[1]["owns_gil"] = False
    assert frames_of(json.dumps(dump), 3)[0] == "wait3 (libc.so.6:3)"
    for wrong in ("", "[]", "{}", "[1]", '[{"owns_gil": true}]'):
        assert frames_of(wrong, 1) == []
