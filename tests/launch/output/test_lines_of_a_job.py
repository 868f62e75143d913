"""What a user sees of a fault under `outlast run`: every line of it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from launch.runs import Run

pytestmark = pytest.mark.slow

TRAINS = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import outlast
import outlast.inprocess as inprocess

rank, how = int(sys.argv[1]), sys.argv[2]

def step(call, job):
    first = call.iteration == 0 and os.environ.get("OUTLAST_REPLACEMENT", "0") == "0"
    if first and job.steps == 5 and dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("a bad batch")
        if how == "die in the last save":
            job._ending._last_save.complete_stop = lambda _: os.kill(os.getpid(), signal.SIGKILL)
            job.stop()
            return
        os.kill(os.getpid(), getattr(signal, how))

@inprocess.Wrapper()
def train(call: inprocess.CallWrapper):
    dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 1)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with outlast.Job("checkpoints", model=ddp, optimizer=optimizer, every=2) as job:
        job.restore()
        # A stop is agreed on by threads, some steps after the request.
        last = 10 if how in ("raise", "SIGKILL") else 10**9
        while job.steps < last:
            call.ping()
            step(call, job)
            loss = ddp(torch.ones(4, 2)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.step()
    del ddp
    dist.destroy_process_group()

train()
"""


def run(tmp_path: Path, rank: int, how: str) -> Run:
    return Run(tmp_path, TRAINS, "--nproc-per-node=2", args=[str(rank), how])


def lines(run: Run) -> list[str]:
    """The lines on stderr, with what differs from run to run replaced."""
    text = re.sub(r"\d\d:\d\d:\d\d", "TIME", run.err)
    text = re.sub(r"\d+ min \d+ s|[\d.]+ (s|ms|µs)\b", "DURATION", text)
    text = re.sub(r"pid \d+|process \d+", "PID", text)
    text = re.sub(r"\bon \S+: |\bhost \S+\)", "HOST", text)
    return [line for line in text.splitlines() if set(line) & set("^~") == set()]


def test_an_exception(tmp_path: Path) -> None:
    with run(tmp_path, 1, "raise") as job:
        assert job.wait() == 0
    script = tmp_path / "script.py"
    number = (
        script.read_text().splitlines().index('            raise ValueError("a bad batch")') + 1
    )
    step = script.read_text().splitlines().index("            step(call, job)") + 1
    started, *middle, restored, not_repeated, ended = lines(job)
    assert started == "[outlast] TIME started 2 ranks: rank 0 is PID, rank 1 is PID"
    assert middle == [
        f"[1] restart of iteration 0: rank 1 HOSTValueError: a bad batch, "
        f"at script.py:{number} in step",
        "[1] Traceback (most recent call last):",
        f'[1]   File "{script}", line {step}, in train',
        "[1]     step(call, job)",
        f'[1]   File "{script}", line {number}, in step',
        '[1]     raise ValueError("a bad batch")',
        "[1] ValueError: a bad batch",
    ]
    assert (
        restored == "[0] continuing after step 5 with the state of the surviving ranks (DURATION)"
    )
    # The script counts its steps by itself.
    assert not_repeated.startswith(
        "[0] the fault came after step 5: if it was the last one of an epoch"
    )
    counted = f"1 restart: 1 x ValueError at script.py:{number} (rank 1)"
    assert ended == f"[outlast] TIME job completed after DURATION and {counted}"


@pytest.mark.parametrize("rank", [0, 1])  # rank 0 serves the store of the process group
def test_a_killed_rank(tmp_path: Path, rank: int) -> None:
    with run(tmp_path, rank, "SIGKILL") as job:
        assert job.wait() == 0
    assert "Traceback" not in job.err
    assert job.err.count("ended without a report (killed or crashed)") == 1
    assert job.verdict == "job completed"


def test_a_rank_that_is_told_to_stop(tmp_path: Path) -> None:
    with run(tmp_path, 1, "SIGTERM") as job:
        assert job.wait() == 128 + signal.SIGTERM
    assert not any("fail" in line for line in job.words)
    assert job.words[-1].startswith("job stopped as told: saved, exit code 143, after ")


def test_a_rank_that_dies_in_the_last_save_of_a_stop(tmp_path: Path) -> None:
    """The other one saves the step that it has."""
    with run(tmp_path, 1, "die in the last save") as job:
        assert job.wait() == 128 + signal.SIGTERM
    newest = r"step ([5-9]|\d\d+), the newest one that the ranks ha(d|ve), is saved( now)? \("
    assert re.search(newest, job.err), job.err  # they agree on the stop beside the training
    assert "rank 1 (pid " in job.err
    assert job.words[-1].startswith("job stopped as told: saved, exit code 143, after ")
