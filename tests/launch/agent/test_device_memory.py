"""A replacement, and the memory of a device that its predecessor had: it starts when that is free.

The lock of a file stands for the memory: a process has it as long as one that has inherited the
file is there.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from launch.runs import WORKER, Run
from outlast.launch.workers.device_holders import HeldMemory
from unkillable import unkillable

LAUNCHER = """
from outlast.launch.workers import device_holders

device_holders.DEVICE_FILES = ("{device}*",)
"""
SCRIPT = (
    """
import fcntl, os, signal, sys
file = open(os.environ["DEVICE"] + os.environ["RANK"], "w")
if "holds" in sys.argv[1:]:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit("out of memory")
if os.environ["OUTLAST_REPLACEMENT"] == "0" and os.fork() == 0:  # as a worker of a `DataLoader`
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()
"""
    + WORKER
)


def run(tmp_path: Path, *args: str, limits: str = "") -> Run:
    device = tmp_path / "device"
    return Run(
        tmp_path,
        SCRIPT,
        "--nproc-per-node=2",
        args=args,
        env={"DEVICE": str(device)},
        launcher=LAUNCHER.format(device=device) + limits,
    )


def loader_of(tmp_path: Path, pid: int) -> int:
    """The worker of its loader; the driver says what that has."""
    [child] = psutil.Process(pid).children()
    (tmp_path / "memory").write_text(f"1, 77\n{child.pid}, 1024\n{pid}, [N/A]\n")
    return child.pid


@pytest.mark.slow
def test_a_replacement_does_not_meet_the_memory_of_the_dead_rank(tmp_path: Path) -> None:
    with run(tmp_path, "holds") as started:
        first = started.start_job(2)
        first[1].kill()
        second = started.ready(1)
        assert started.complete(first[0], second) == 0
    assert "replacement 1 of 3" in started.err
    assert "out of memory" not in started.err


@pytest.mark.slow
def test_it_waits_until_the_memory_is_free(tmp_path: Path) -> None:
    with run(tmp_path, "holds") as started:
        first = started.start_job(2)
        loader = loader_of(tmp_path, first[1].pid)
        with unkillable(loader):
            first[1].kill()
            started.until_said("rank 1 waits, for at most 30 s, until the memory of its device is")
            name = psutil.Process(loader).name()
            assert f"held by process {loader} ({name})" in started.err
            assert "rank 1 is now pid" not in started.err
        second = started.ready(1)
        assert started.complete(first[0], second) == 0
    assert "replacement 2" not in started.err


def test_the_memory_is_not_free_before_its_holder_has_ended() -> None:
    """At its exit, a process closes its files first, and then the driver gives the memory back."""
    with subprocess.Popen(["sleep", "inf"]) as holder:
        memory = HeldMemory([psutil.Process(holder.pid)], 0.0)
        closed = memory.is_free
        holder.kill()
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        assert memory.is_free  # its parent need not take notice
    assert not closed


@pytest.mark.slow
def test_it_waits_for_a_limited_time(tmp_path: Path) -> None:
    with run(tmp_path, limits="device_holders.FREE_S = 1.0") as started:
        first = started.start_job(2)
        loader = loader_of(tmp_path, first[1].pid)
        with unkillable(loader):
            first[1].kill()
            second = started.ready(1)
        started.until_said("the memory of its device is not free after 1 s, held by process")
        assert started.complete(first[0], second) == 0
