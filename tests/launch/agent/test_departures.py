"""A rank that has left the training, and whose process goes on: it is replaced, and ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.runs import WORKER, Run

LINGERS = """
import atexit, os, sys, threading
from outlast.inprocess import Wrapper
how, first = sys.argv[1], os.environ["OUTLAST_REPLACEMENT"] == "0"
mine = os.environ["RANK"] == "0"
forever = threading.Event()
if mine and how.endswith("at exit"):
    atexit.register(forever.wait)
elif mine:
    threading.Thread(target=forever.wait, name="gpu-monitor").start()
@Wrapper()
def train(call):
    if how.startswith("fatal"):
        undefined_name
    if how == "exit" and call.iteration == 0:
        if mine:
            sys.exit(5)
        forever.wait()

if mine and how == "early":
    raise KeyError("before the call")
train()
if mine and how == "late":
    sys.exit(3)
"""

WORKS_ON = """
import os, sys, threading
from outlast.inprocess import Wrapper

@Wrapper()
def train():
    return 1

train()
if os.environ["RANK"] == "0":
    threading.Event().wait(8)  # longer than the grace time
    print("uploaded", flush=True)
"""

COMES_LATE = """
import os, pathlib, signal, threading, time
from outlast.inprocess import Compose, Wrapper
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks

def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)

if os.environ["OUTLAST_REPLACEMENT"] != "0":
    pathlib.Path("started").touch()
    wait_for("over")

@Wrapper(rank_assignment=Compose(ShiftRanks(), AwaitReplacements(0)))
def train():
    if os.environ["RANK"] == "1" and os.environ["WORLD_SIZE"] == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ["WORLD_SIZE"] == "1":
        wait_for("started")  # a completed job gets no replacement
    return 1

if train() is None:
    pathlib.Path("late").touch()
    threading.Event().wait(8)  # longer than the grace time
    print("uploaded", flush=True)
else:
    pathlib.Path("over").touch()
    wait_for("late")
"""


def ended(run: Run) -> list[str]:
    """The lines about processes that were ended."""
    return [line for line in run.words if line.endswith(": it is ended")]


@pytest.mark.slow
def test_the_rank_is_replaced_while_its_old_process_goes_on(tmp_path: Path) -> None:
    with Run(tmp_path, LINGERS, "--nproc-per-node=2", "--grace=1", args=["exit"]) as run:
        assert run.wait() == 0
    pids = [line.split()[-1] for line in run.words if line.startswith("rank 0 is now pid")]
    assert len(pids) == 1
    first, second = ended(run)  # the replacement has such a thread too
    assert first.startswith("rank 0 has left the training, and its process ")
    assert first.endswith("has not ended within 5 s; its threads: gpu-monitor: it is ended")
    assert f"process {pids[0]} " in second
    assert run.words.index(f"rank 0 is now pid {pids[0]}") < run.words.index(first)
    assert any(line.endswith("exited with code 5: replacement 1 of 3") for line in run.words)
    assert run.verdict.startswith("job completed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code"),
    [("fatal", 93), pytest.param("fatal at exit", 93, marks=pytest.mark.slow), ("early", 1)],
)
def test_a_job_that_fails_ends(tmp_path: Path, how: str, code: int) -> None:
    with Run(tmp_path, LINGERS, "--nproc-per-node=2", "--grace=1", args=[how]) as run:
        assert run.wait() == code
    lines = [line for line in ended(run) if line.startswith("rank 0 ")]
    assert len(lines) == (how != "early"), "it is ended at once, with the others"
    assert all(("gpu-monitor" in line) == (how == "fatal") for line in lines)
    error = "KeyError" if how == "early" else "NameError"
    assert f"first cause: {error} at script.py:" in run.words[-1], run.err


@pytest.mark.slow
def test_the_exit_code_of_a_process_that_is_ended_is_its_own(tmp_path: Path) -> None:
    with Run(tmp_path, LINGERS, "--nproc-per-node=2", "--grace=1", args=["late"]) as run:
        assert run.wait() == 3
    assert "gpu-monitor" in ended(run)[0]
    assert run.words[-1].endswith("exited with code 3"), run.err
    assert "Exception ignored" not in run.err


@pytest.mark.slow
def test_a_program_that_works_on_after_its_training_is_not_ended(tmp_path: Path) -> None:
    with Run(tmp_path, WORKS_ON, "--nproc-per-node=2", "--grace=1") as run:
        assert run.wait() == 0
    assert "uploaded" in run.out


@pytest.mark.slow
def test_a_replacement_that_comes_late_and_works_on_is_not_ended(tmp_path: Path) -> None:
    with Run(tmp_path, COMES_LATE, "--nproc-per-node=2", "--grace=1") as run:
        assert run.wait() == 0
    assert "uploaded" in run.out, run.err
    assert not ended(run)


@pytest.mark.slow
def test_a_replacement_that_waits_before_a_completed_call_is_ended(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=3", "--grace=1") as run:
        first = run.start_job(3)
        first[1].kill()
        run.ready(rank=1)  # it takes no part, and does not end
        run.set_job("completed", by=[first[0], first[2]])
        first[0].succeed()
        first[2].succeed()
        assert run.wait() == 0
    (line,) = ended(run)
    assert line.startswith("rank 1 came too late for the training, and its process ")
    assert run.verdict.startswith("job completed")
