"""The exit code and the last lines say what happened."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from launch.runs import WORKER, Run
from outlast.events.event import event_from_dict
from outlast.events.run_folders import runs_in
from outlast.events.types import WorkerExited, WorkerStarted

RAISES = """
import os, signal, sys, time
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1":
        raise RuntimeError("the first cause")
    signal.pause()
main()
"""
SPEAKS = """
import os, signal, sys
if os.environ["RANK"] == "0":
    signal.pause()
for i in range(100):
    print("line", i, file=sys.stderr)
sys.stderr.flush()
{end}
"""


@pytest.mark.slow
def test_the_traceback_of_the_error_file(tmp_path: Path) -> None:
    with Run(tmp_path, RAISES, "--nproc-per-node=2") as run:
        assert run.wait() == 1
    start = next(
        n for n, line in enumerate(run.words) if line.startswith("job failed, exit code 1")
    )
    cause = run.words[start + 1]
    assert cause.startswith("first cause: RuntimeError at script.py:7 (rank 1, ")
    assert cause.endswith(f", host {socket.gethostname()}): the first cause")
    assert run.words[start + 2 :] == []  # the traceback was on the console
    assert run.err.count("RuntimeError: the first cause") == 1  # that traceback


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "how"),
    [
        ("sys.exit(17)", 17, "exited with code 17"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL from outside"),
        ("os.abort()", 134, "was killed by SIGABRT"),
    ],
)
@pytest.mark.parametrize("redirects", ["0", "3"])
def test_else_the_last_lines_on_stderr(
    tmp_path: Path, end: str, code: int, how: str, redirects: str
) -> None:
    options = ["--nproc-per-node=2", "--redirects", redirects]
    with Run(tmp_path, SPEAKS.format(end=end), *options) as run:
        assert run.wait() == code
    assert any(line.startswith("first cause: rank 1 ") and line.endswith(how) for line in run.words)
    start = run.words.index("last lines on stderr:")
    last = [line for line in run.words[start + 1 :] if "line" in line]
    assert last[-1] == "  line 99"
    assert len(last) <= 40


def test_a_script_that_cannot_start_is_reported_once(tmp_path: Path) -> None:
    with Run(tmp_path, "syntax error here", "--nproc-per-node=1") as run:
        assert run.wait() == 1
    assert run.words[-1].startswith("first cause: SyntaxError at script.py:1 (rank ")


def test_a_program_that_cannot_be_run(tmp_path: Path) -> None:
    with Run(tmp_path, "", "--no-python") as run:  # the file exists but is not executable
        assert run.wait() == 126
    assert "cannot run" in run.err


def test_the_events_of_a_run(tmp_path: Path) -> None:
    options = ["--nproc-per-node=2", "--events-dir=events", "--run-id=nightly"]
    with Run(tmp_path, WORKER, *options) as run:
        first = run.start_job(2)
        (found,) = runs_in(tmp_path / "events")
        assert found.run_id == "nightly"
        assert {worker.env["OUTLAST_EVENTS_DIR"] for worker in first} == {str(found.folder)}
        first[1].fail()
        second = run.ready(1)
        assert run.complete(first[0], second) == 0
        pid = run.process.pid
    path = found.folder / f"agent-{pid}.jsonl"
    events = [event_from_dict(json.loads(line)) for line in path.read_text().splitlines()]
    assert {event.pid for event in events} == {pid}
    started = [(e.rank, e.worker_pid, e.attempt) for e in events if isinstance(e, WorkerStarted)]
    assert started == [(0, first[0].pid, 0), (1, first[1].pid, 0), (1, second.pid, 1)]
    ended = {(e.rank, e.worker_pid, e.exit_code) for e in events if isinstance(e, WorkerExited)}
    assert ended == {(0, first[0].pid, 0), (1, first[1].pid, 3), (1, second.pid, 0)}
