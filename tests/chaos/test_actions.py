"""Every kind of fault, fired in a real process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from outlast.chaos import Kind, fire
from outlast.chaos.actions import HEADROOM_BYTES
from outlast.errors import ChaosError
from procs import NET_S, Job

# SIGUSR1 dumps all stacks without the GIL. The handler of SIGUSR2 in the main thread needs the GIL,
# and so does the thread that reads the pipe.
VICTIM = """
import faulthandler, json, os, resource, signal, subprocess, sys, threading
from outlast import chaos

def say(event, **more):
    print(json.dumps({"event": event, **more}), flush=True)

faulthandler.register(signal.SIGUSR1, all_threads=True)
signal.signal(signal.SIGUSR2, lambda *_: say("handled"))
def listen():
    pipe = os.open(os.environ["PIPE"], os.O_RDWR)
    while os.read(pipe, 1):
        say("heard")

threading.Thread(target=listen, daemon=True).start()
kind, *options = sys.argv[1:]
if "handle" in options:
    signal.signal(signal.SIGTERM, lambda *_: say("terminated"))
monitor = subprocess.Popen(["sleep", "1000"]) if kind == "kill_monitor" else None
say("before")
try:
    chaos.fire(kind, monitor_pid=monitor and monitor.pid)
except MemoryError as error:
    unlimited = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    again = len(bytes(2 * chaos.actions.HEADROOM_BYTES))
    say("refused", message=str(error), cause=type(error.__cause__).__name__, unlimited=unlimited)
say("after", monitor=monitor and monitor.wait())
"""

RANK = """
import faulthandler, json, os, signal, torch
import torch.distributed as dist
from outlast import chaos

faulthandler.register(signal.SIGUSR1, all_threads=True)
dist.init_process_group("gloo")
ranks = dist.new_group([0, 1])
value = torch.ones(1)
dist.all_reduce(value)
print(json.dumps({"event": "before", "value": value.item()}), flush=True)
if dist.get_rank() == 1:
    chaos.fire("hang_collective", group=ranks if os.environ.get("SUBGROUP") else None)
dist.all_reduce(value, group=ranks)
print(json.dumps({"event": "after"}), flush=True)
"""


@pytest.fixture
def victim(tmp_path: Path, pipe: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "victim.py"
    path.write_text(VICTIM)
    monkeypatch.setenv("PIPE", str(tmp_path / "pipe"))
    return path


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def events(job: Job, rank: int = 0) -> list[object]:
    return [line["event"] for line in job.lines(rank)]


def wait_for_stack(job: Job, rank: int, *functions: str) -> None:
    """Waits until the main thread's stack contains these functions, innermost first."""
    deadline = time.monotonic() + NET_S
    while True:
        seen = len(job.errors(rank))
        job.send(rank, signal.SIGUSR1)
        # The main thread comes last in a dump, its outermost call at the end.
        while "in <module>" not in job.errors(rank)[seen:]:
            assert time.monotonic() < deadline, job.errors(rank)[-4000:]
            time.sleep(0.005)
        stack = job.errors(rank)[seen:]
        places = [stack.find(f"in {name}\n") for name in functions]
        if -1 not in places and places == sorted(places):
            return
        assert time.monotonic() < deadline, stack


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("exception", 1),
        ("system_exit", 1),
        ("sigkill", -signal.SIGKILL),
        ("sigterm", -signal.SIGTERM),
        ("segfault", -signal.SIGSEGV),
        ("abort", -signal.SIGABRT),
        ("oom_kill", -signal.SIGKILL),
    ],
)
def test_kinds_that_end_the_process(tmp_path: Path, victim: Path, kind: str, code: int) -> None:
    with Job(tmp_path, victim, nprocs=1, args=[kind]) as job:
        job.start_all()
        assert job.wait(0) == code
        assert events(job) == ["before"]
        if kind == "exception":
            assert "ChaosError: a planned exception" in job.errors(0)


def test_a_sigterm_may_be_handled(tmp_path: Path, victim: Path) -> None:
    with Job(tmp_path, victim, nprocs=1, args=["sigterm", "handle"]) as job:
        job.start_all()
        assert job.wait(0) == 0
        assert events(job) == ["before", "terminated", "after"]


def test_a_stopped_process_continues_on_sigcont(tmp_path: Path, victim: Path) -> None:
    with Job(tmp_path, victim, nprocs=1, args=["sigstop"]) as job:
        job.start_all()
        process = psutil.Process(job.pid(0))
        deadline = time.monotonic() + NET_S
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert events(job) == ["before"]
        job.send(0, signal.SIGCONT)
        assert job.wait(0) == 0
        assert events(job) == ["before", "after"]


def test_memory_is_exhausted_and_freed(tmp_path: Path, victim: Path) -> None:
    with Job(tmp_path, victim, nprocs=1, args=["out_of_memory"]) as job:
        job.start_all()
        assert job.wait(0) == 0, job.errors(0)
        line = job.wait_for_line(0, lambda line: line["event"] == "refused")
        assert line["message"].startswith("a planned MemoryError after ")
        taken = int(line["message"].split()[-2])
        assert HEADROOM_BYTES // 2 < taken < 2 * HEADROOM_BYTES
        assert line["cause"] == "MemoryError"
        assert line["unlimited"]
        assert events(job) == ["before", "refused", "after"]


@pytest.mark.parametrize("kind", ["hang", "hang_python"])
def test_a_hang_without_the_gil_lets_other_code_run(
    tmp_path: Path, victim: Path, pipe: int, kind: str
) -> None:
    with Job(tmp_path, victim, nprocs=1, args=[kind]) as job:
        job.start_all()
        job.wait_for_line(0, lambda line: line["event"] == "before")
        wait_for_stack(job, 0, f"_{kind}", "fire")
        job.send(0, signal.SIGUSR2)
        job.wait_for_line(0, lambda line: line["event"] == "handled")
        os.write(pipe, b"!")
        job.wait_for_line(0, lambda line: line["event"] == "heard")
        wait_for_stack(job, 0, f"_{kind}", "fire")  # still hangs
        job.kill(0)


def test_a_hang_with_the_gil_blocks_all_python_code(
    tmp_path: Path, victim: Path, pipe: int
) -> None:
    with Job(tmp_path, victim, nprocs=1, args=["hang_gil", "handle"]) as job:
        job.start_all()
        job.wait_for_line(0, lambda line: line["event"] == "before")
        wait_for_stack(job, 0, "_hang_gil", "fire")
        os.write(pipe, b"!")
        for number in (signal.SIGUSR2, signal.SIGTERM):
            job.send(0, number)
            wait_for_stack(job, 0, "_hang_gil", "fire")
        assert events(job) == ["before"]
        job.kill(0)


@pytest.mark.slow
@pytest.mark.parametrize("subgroup", ["", pytest.param("yes", marks=pytest.mark.slow)])
def test_a_hang_in_a_collective_blocks_the_peer(tmp_path: Path, subgroup: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with Job(tmp_path, script, nprocs=2, env={"SUBGROUP": subgroup}) as job:
        job.start_all()
        for rank in (0, 1):
            job.wait_for_line(rank, lambda line: line == {"event": "before", "value": 2.0})
        wait_for_stack(job, 1, "recv", "_hang_collective", "fire")
        wait_for_stack(job, 0, "all_reduce")
        assert events(job, 0) == events(job, 1) == ["before"]
        for rank in (0, 1):
            job.kill(rank)


def test_the_monitor_process_is_killed(tmp_path: Path, victim: Path) -> None:
    with Job(tmp_path, victim, nprocs=1, args=["kill_monitor"]) as job:
        job.start_all()
        assert job.wait(0) == 0
        assert job.lines(0)[-1] == {"event": "after", "monitor": -signal.SIGKILL}


def test_impossible_faults_raise_with_the_reason() -> None:
    with pytest.raises(ChaosError, match="kill_monitor: this rank has no monitor"):
        fire(Kind.KILL_MONITOR)
    with pytest.raises(ChaosError, match="not initialized"):
        fire("hang_collective")
    with pytest.raises(ChaosError, match="disk_full: the writer processes do not run under"):
        fire("disk_full")
    with pytest.raises(ValueError, match="meteorite"):
        fire("meteorite")
