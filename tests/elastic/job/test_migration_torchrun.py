"""Runs the programs on the torchrun migration page, extracted from its text."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outlast
from outlast.elastic import ElasticLoader
from procs import NET_S, Job
from zygote import shared

PAGE = Path(__file__).parents[3] / "docs" / "migration.md"
FILES = dict(re.findall(r'```(?:python|sh) title="(.*?)"\n(.*?)```', PAGE.read_text(), re.DOTALL))
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
OUTLAST = ("outlast.launch", "run", "--standby=0", "--standalone", "--nproc-per-node", "2")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("zygote")]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes all programs of the page into the working directory."""
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)


def run(tmp_path: Path, *command: str) -> str:
    """Runs a program that must succeed; returns its output."""
    with Job(tmp_path, "-m", nprocs=1, args=command, spawn=shared().launch) as job:
        job.start_all()
        assert job.wait_all() == {0: 0}, job.output(0) + job.errors(0)
        return job.output(0)


def run_before(tmp_path: Path, *command: str) -> str:
    """Runs the old program, which does not use `outlast`. At the exit of a process, torch itself
    may abort it, which was seen once in hundreds of runs; then it runs again.
    """
    for _ in range(5):
        Path("last.pt").unlink(missing_ok=True)
        with Job(tmp_path, "-m", nprocs=1, args=command, spawn=shared().launch) as job:
            job.start_all()
            codes = job.wait_all()
            if codes == {0: 0}:
                return job.output(0)
            assert "terminate called without an active exception" in job.errors(0), job.errors(0)
    raise AssertionError("torch has aborted five times")


def saved_by_hand() -> dict[str, Any]:
    found: dict[str, Any] = torch.load("last.pt", weights_only=True)
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two nested states are bit-identical."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_the_new_program_continues_from_the_old_checkpoint(tmp_path: Path) -> None:
    run_before(tmp_path, *TORCHRUN, "before.py", "2")
    assert saved_by_hand()["step"] == 20

    # There is nothing left to train: it saves what it has adopted. Ends of lines are not checked:
    # the workers of torchrun share one pipe, and write each line in two pieces.
    said = run(tmp_path, *TORCHRUN, "after.py", "2")
    for rank in range(2):
        assert f"rank {rank} resumes after step 20, in epoch 2" in said
        assert f"rank {rank} has done 20 steps, 2 epochs" in said
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = ElasticLoader(range(960), global_batch_size=96, rank=0, replicas=1)  # type: ignore[arg-type]
    options: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    with outlast.Job("checkpoints", random=False, signals=(), **options) as job:
        assert job.restore() == 20
        assert loader.epoch == 2
    assert same(model.state_dict(), saved_by_hand()["model"])
    assert same(optimizer.state_dict(), saved_by_hand()["optimizer"])

    # A fault after step 22, when the adopted state is the only checkpoint.
    Path("plan.json").write_text('{"faults": [{"rank": 1, "kind": "exception", "step": 22}]}')
    said = run(tmp_path, *OUTLAST, "--chaos", "plan.json", "after.py", "4")
    for rank in range(2):
        resumed = re.findall(
            rf"\[{rank}\] rank {rank} resumes after step (\d+), in epoch 2\n", said
        )
        # After the fault, with the state that the ranks have.
        assert [int(step) for step in resumed] == [20, 22]
        assert f"[{rank}] rank {rank} has done 40 steps, 4 epochs" in said

    # `last.pt` still exists, but the newer checkpoint wins.
    said = run(tmp_path, *TORCHRUN, "after.py", "6")
    for rank in range(2):
        assert f"rank {rank} resumes after step 40, in epoch 4" in said
        assert f"rank {rank} has done 60 steps, 6 epochs" in said


def test_without_a_checkpoint_of_either_kind(tmp_path: Path) -> None:
    said = run(tmp_path, *OUTLAST, "after.py", "1")
    assert "rank 0 resumes after step 0, in epoch 0" in said
    assert "rank 0 has done 10 steps, 1 epochs" in said


def test_torchrun_exits_with_1_on_a_signal_and_the_state_is_saved(tmp_path: Path) -> None:
    command = (*TORCHRUN, "after.py", "100000")
    with Job(tmp_path, "-m", nprocs=1, args=command, spawn=shared().launch) as job:
        stop_in_training(job)
        assert job.wait(0) == 1, job.errors(0)
    assert last_step() > 0


def test_the_job_script_requeues(tmp_path: Path) -> None:
    scheduler = tmp_path / "bin" / "scontrol"
    scheduler.parent.mkdir()
    scheduler.write_text('#!/bin/sh\necho scontrol "$@"\n')
    scheduler.chmod(0o755)
    path = f"{scheduler.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    bash = "import os; os.execvp('bash', ['bash', 'job.sh'])"
    env = {"PATH": path, "SLURM_JOB_ID": "7"}
    with Job(tmp_path, "-c", nprocs=1, args=(bash,), env=env) as job:
        stop_in_training(job)
        assert job.wait(0) == 0, job.errors(0)
        assert job.output(0).endswith("scontrol requeue 7\n")
    assert last_step() > 0


def stop_in_training(job: Job) -> None:
    """Sends SIGTERM once both ranks handle it."""
    job.start_all()
    deadline = time.monotonic() + NET_S
    while job.output(0).count("resumes after step") < 2:
        assert job.running(0), job.errors(0)
        assert time.monotonic() < deadline, job.output(0) + job.errors(0)
        time.sleep(0.02)
    job.send(0, signal.SIGTERM)


def last_step() -> int:
    return max(int(path.name.removeprefix("step-")) for path in Path("checkpoints").glob("step-*"))
