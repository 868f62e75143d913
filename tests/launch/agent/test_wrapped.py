"""`outlast run` with workers that use the wrapper, and with a fault plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.runs import Run

pytestmark = pytest.mark.slow

FAILS_AFTERWARDS = """
import os, sys
from outlast.inprocess import Wrapper

@Wrapper()
def train():
    return 1

train()
sys.exit(4 if os.environ["RANK"] == "1" else 0)
"""

CANNOT_WORK = """
import os
from outlast.inprocess import Wrapper

@Wrapper()
def train():
    if os.environ["RANK"] == "1":
        undefined_name
    import threading
    threading.Event().wait()

train()
"""

LEAVES = """
import os
import torch
import torch.distributed as dist
import outlast
from outlast import inprocess

@inprocess.Wrapper()
def train():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with outlast.Job("checkpoints", model=model, optimizer=optimizer) as job:
        job.restore()
        if os.environ["RANK"] == "1":
            os._exit(0)
        dist.barrier()

train()
"""

CONSEQUENCES = """
import ctypes, os, pathlib, time
import outlast
from outlast import inprocess

RANK = int(os.environ["RANK"])

@inprocess.Wrapper(soft_timeout=5, hard_timeout=6, termination_grace_time=1)
def train(call: inprocess.CallWrapper):
    if call.iteration > 0:
        return
    if RANK == 3:
        while len(list(pathlib.Path().glob("blocked *"))) < 3:
            time.sleep(0.01)
        raise RuntimeError("the first cause")
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    pathlib.Path(f"blocked {RANK}").touch()
    lock(mutex)  # for ever: what no interrupt and no abort reaches

train()
print("size", os.environ["WORLD_SIZE"], flush=True)
"""

OWN_PORT = """
import os, signal
import torch.distributed as dist
import outlast.compat.nvrx.inprocess as inprocess

@inprocess.Wrapper(store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 1})
def train(call_wrapper: inprocess.CallWrapper = None):
    dist.init_process_group("gloo")
    if "1" == os.environ["RANK"] and os.environ["OUTLAST_REPLACEMENT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()

train()
"""

TREE = """
import os, signal
import torch.distributed as dist
import outlast.compat.nvrx.inprocess as inprocess

policies = inprocess.rank_assignment
layer = policies.Layer(min_ranks=3, max_ranks=3, flag=policies.LayerFlag.RESERVE)

def kill_once(name):
    if not os.path.exists(name):
        open(name, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

@inprocess.Wrapper(rank_assignment=policies.Tree(layers=[layer]))
def train(call_wrapper: inprocess.CallWrapper = None):
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        kill_once("first")
    dist.barrier()
    if dist.get_rank() == 2:
        kill_once("second")
    dist.barrier()
    print("DONE", dist.get_rank(), dist.get_world_size(), flush=True)
    dist.destroy_process_group()

train()
"""

STATE = """
import os, sys
print(os.environ.get("OUTLAST_CHAOS_STATE", ""), os.path.isdir(os.environ["OUTLAST_CHAOS_STATE"]))
"""

PLAN = json.dumps({"faults": [{"rank": 0, "step": 1, "kind": "exception"}]})


def test_a_worker_that_fails_after_it_has_completed_fails_the_job(tmp_path: Path) -> None:
    with Run(tmp_path, FAILS_AFTERWARDS, "--nproc-per-node=3") as run:
        assert run.wait() == 4
    assert "not replaced, the job is completed" in run.err


def test_a_job_that_no_restart_fixes_ends_with_93_and_its_cause(tmp_path: Path) -> None:
    with Run(tmp_path, CANNOT_WORK, "--nproc-per-node=3") as run:
        assert run.wait() == 93
    summary = run.err.rpartition("job failed, exit code 93")[2]
    assert "first cause: NameError at script.py:" in summary, run.err
    assert summary.rstrip().endswith(" (rank 1): name 'undefined_name' is not defined")
    assert "Traceback" not in summary  # the rank has shown it
    assert "exited with code" not in run.err
    assert "replacement" not in run.err


@pytest.mark.parametrize("nprocs", [3, 4])
def test_a_tree_that_needs_all_ranks_waits_for_replacements_where_it_has_no_reserve(
    tmp_path: Path, nprocs: int
) -> None:
    with Run(tmp_path, TREE, f"--nproc-per-node={nprocs}", "--max-restarts=4") as run:
        assert run.wait() == 0, run.err
    # A replacement that asks to join while the others return has all called once more.
    done = [each.partition("] ")[2] for each in run.out.splitlines()]
    assert set(done) == {f"DONE {rank} 3" for rank in range(3)}
    assert len(done) in (3, 6)


def test_a_rank_that_exits_with_0_within_the_call_is_not_replaced_and_the_job_says_why(
    tmp_path: Path,
) -> None:
    with Run(tmp_path, LEAVES, "--nproc-per-node=2", "--max-restarts=2") as run:
        assert run.wait() != 0
    assert "exited with code 0 within the wrapped function" in run.err
    assert "outlast run replaces no rank that exits with code 0" in run.err
    assert "replacement 1 of 2" not in run.err


def test_the_launcher_removes_what_the_fault_plan_left(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(PLAN)
    with Run(tmp_path, STATE, "--nproc-per-node=2", f"--chaos={plan}") as run:
        assert run.wait() == 0
    folder, there = run.out.splitlines()[0].rpartition("] ")[2].split()
    assert there == "True"
    assert Path(folder).is_relative_to(run.temporary)
    assert list(run.temporary.iterdir()) == []


def test_a_folder_of_ones_own_is_used_and_left(tmp_path: Path) -> None:
    plan, kept = tmp_path / "plan.json", tmp_path / "kept"
    plan.write_text(PLAN)
    env = {"OUTLAST_CHAOS_STATE": str(kept)}
    with Run(tmp_path, STATE, f"--chaos={plan}", env=env) as run:
        assert run.wait() == 0
    assert f"{kept} True" in run.out
    assert kept.is_dir()


def test_a_port_of_its_own_does_not_hide_the_wrapped_call(tmp_path: Path) -> None:
    """Programs for nvidia-resiliency-ext give the wrapper a port other than MASTER_PORT."""
    with Run(tmp_path, OWN_PORT, "--nproc-per-node=2") as run:
        assert run.wait() == 0
        assert any(
            "killed by SIGKILL from outside: replacement 1 of 3" in line for line in run.words
        )


def test_consequences_of_one_fault_do_not_count(tmp_path: Path) -> None:
    """Three ranks are ended by the hard timeout, because of the fault of the fourth."""
    with Run(tmp_path, CONSEQUENCES, "--nproc-per-node=4", "--max-restarts=1") as run:
        assert run.wait() == 0, run.err
    assert run.out.count("size 4") == 4, run.err
    told = [line for line in run.words if "does not count against --max-restarts" in line]
    assert len(told) == 3, run.err
    assert all("rank 3 had failed first" in line for line in told)
