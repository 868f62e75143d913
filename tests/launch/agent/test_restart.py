"""Without Wrapper, as with torchrun: a failure restarts all workers."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from launch.runs import WORKER, Run

STUBBORN = WORKER.replace(
    "names =", "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\nnames ="
)
WITH_STORE = """
import datetime, json, os, signal, sys
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
old = store.check(["left by an attempt"])
dist.barrier()
store.set("left by an attempt", attempt)
print(json.dumps({"pid": os.getpid(), "rank": dist.get_rank(), "env": {}, "old": old}), flush=True)
if attempt == "0" and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""

WITH_SNAPSHOTS = """
import json, os, signal, sys
import torch
import torch.distributed as dist
from outlast.async_checkpoint import Checkpointer
from outlast.events import MemorySink
dist.init_process_group("gloo")
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank()
sink = MemorySink()
checkpointer = Checkpointer(sys.argv[1], events=sink)
state = {"weight": torch.zeros(1000), f"own{rank}": torch.zeros(1000)}
step = checkpointer.restore(state)
source = next((event.source for event in sink.events if event.kind == "checkpoint_restored"), "")
print(json.dumps({"pid": os.getpid(), "rank": rank, "env": {}, "from": source}), flush=True)
if attempt == "0":
    full = {"weight": torch.ones(1000), f"own{rank}": torch.ones(1000)}
    checkpointer.save(1, full).wait()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
assert state["weight"].sum() == state[f"own{rank}"].sum() == 1000
dist.barrier()
checkpointer.close()
dist.destroy_process_group()
"""


def test_by_default_the_first_failure_ends_the_job(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=3") as run:
        first = [run.ready(rank) for rank in range(3)]
        first[1].fail()
        assert run.wait() == 3
    assert run.words[1] == f"rank 1 (pid {first[1].pid}) exited with code 3: this ends the job"


def test_a_failure_restarts_all_from_scratch(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2", "--max-restarts=1") as run:
        first = [run.ready(rank) for rank in range(2)]
        first[0].kill()
        second = [run.ready(rank) for rank in range(2)]
        assert second[1].pid != first[1].pid
        for ready in second:
            assert ready.env["TORCHELASTIC_RESTART_COUNT"] == "1"
            assert ready.env["TORCHELASTIC_MAX_RESTARTS"] == "1"
            assert ready.env["OUTLAST_REPLACEMENT"] == "0"
            assert ready.env["MASTER_PORT"] == first[0].env["MASTER_PORT"]
        for ready in second:
            ready.succeed()
        assert run.wait() == 0
    assert run.words[-2].endswith("was killed by SIGKILL from outside: restarted")


def test_the_restarts_are_limited(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2", "--max-restarts=2") as run:
        for _ in range(2):
            ready = [run.ready(rank) for rank in range(2)]
            ready[1].kill()
        ready = [run.ready(rank) for rank in range(2)]
        ready[0].fail()
        assert run.wait() == 3
    assert any(line.startswith(f"first cause: rank 0 (pid {ready[0].pid}") for line in run.words)


def test_a_worker_that_does_not_end_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    with Run(tmp_path, STUBBORN, "--nproc-per-node=2", "--grace=0.2") as run:
        first = [run.ready(rank) for rank in range(2)]
        first[0].fail()
        assert run.wait() == 3
    assert "[1] asked" in run.out.splitlines()
    assert "still running, killed: rank 1" in run.words


@pytest.mark.slow
def test_the_new_attempt_finds_none_of_the_old_keys(tmp_path: Path) -> None:
    with Run(tmp_path, WITH_STORE, "--nproc-per-node=2", "--max-restarts=1") as run:
        for _ in range(2):
            for rank in range(2):
                assert run.ready(rank).more == {"old": False}
        assert run.wait() == 0


def test_a_signal_between_attempts_ends_the_job(tmp_path: Path) -> None:
    with Run(tmp_path, STUBBORN, "--nproc-per-node=2", "--max-restarts=5", "--grace=40") as run:
        first = [run.ready(rank) for rank in range(2)]
        first[0].fail()
        run.until(lambda: "[1] asked" in run.out, "rank 1 to be asked to end")
        run.process.send_signal(signal.SIGTERM)
        run.until_said("SIGTERM: forwarded")
        first[1].succeed()
        assert run.wait() == 128 + signal.SIGTERM


@pytest.mark.slow
def test_snapshots_in_memory_survive_a_restart_of_all_workers(tmp_path: Path) -> None:
    """The processes that hold them are left alone between two attempts, and are gone at the end."""
    options = ("--nproc-per-node=2", "--max-restarts=1")
    arguments = {
        "args": [str(tmp_path / "c")],
        "env": {"TMPDIR": "/tmp"},
    }  # sockets' paths are short
    with Run(tmp_path, WITH_SNAPSHOTS, *options, **arguments) as run:
        first = [run.ready(rank) for rank in range(2)]
        second = [run.ready(rank) for rank in range(2)]
        assert [ready.more["from"] for ready in first] == ["", ""]
        assert [ready.more["from"] for ready in second] == ["memory", "memory"]
        assert run.wait() == 0
