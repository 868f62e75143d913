"""The last save of a job fails: what was trained is not given up."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import outlast
from outlast.async_checkpoint import FailurePolicy
from outlast.async_checkpoint.storage.directory import list_checkpoints, open_storage
from outlast.elastic.job import ending
from procs import Job
from zygote import shared

Ranks = Callable[..., Job]
SCRIPT = Path(__file__).parents[1] / "scripts" / "last_save.py"
STEPS = [1, 2, 3]


def saved(disk: Path) -> list[str]:
    return sorted(path.name for path in (disk / "checkpoints").glob("step-*"))


def run(ranks: Ranks, disk: Path, **plan: Any) -> tuple[dict[int, int], Job]:
    arguments = json.dumps({"path": str(disk / "checkpoints"), **plan})
    with ranks("last_save", arguments) as job:
        job.start_all()
        return job.wait_all(), job


def names(path: Path) -> list[int]:
    """The steps that can be loaded, each of which need not be valid."""
    return [info.step for info in list_checkpoints(open_storage(str(path)))]


def flip(folder: Path) -> None:
    """Damages the largest file of a checkpoint."""
    file = max(folder.iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def wait_for_pause(job: Job) -> None:
    """Waits until rank 0 has begun a pause of some seconds, by its log."""
    while "is tried again in 8" not in job.errors(0):
        assert job.running(0), job.errors(0)
        time.sleep(0.01)


def trained(job: Job, rank: int) -> list[int]:
    return [line["step"] for line in job.lines(rank) if line["event"] == "trained"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrapped", "every"),
    [(True, None), pytest.param(False, 3, marks=pytest.mark.slow)],
)
def test_a_full_disk_ends_the_job_without_a_restart(
    ranks: Ranks, small_disk: Path, wrapped: bool, every: int | None
) -> None:
    codes, job = run(ranks, small_disk, wrapped=wrapped, every=every)
    assert codes == {0: 1, 1: 1}, job.errors(0)
    for rank in range(2):
        assert trained(job, rank) == STEPS, "no step was made again"
        errors = job.errors(rank)
        assert re.search(r"step 3, the last one, is in memory only: \d+ attempts to save", errors)
        assert "No space left on device" in errors
        assert f"On storage in {small_disk / 'checkpoints'}: step 0; the same command" in errors
        assert f"Make room in {small_disk / 'checkpoints'}\n" in errors
        assert "another folder" not in errors, "of which the same command would know nothing"
        assert "posix_fallocate" not in errors  # the traceback of the writer
    assert len(saved(small_disk)) == 1


def test_the_last_save_is_tried_again(ranks: Ranks, small_disk: Path) -> None:
    codes, job = run(ranks, small_disk, frees=True, limit_s=600)
    assert codes == {0: 0, 1: 0}, job.errors(0)
    for rank in range(2):
        assert trained(job, rank) == STEPS
        assert [line["step"] for line in job.lines(rank) if line["event"] == "ended"] == [3]
    assert "the last save failed, and is tried again" in job.errors(0)
    assert saved(small_disk)[-1].endswith("3")


@pytest.mark.parametrize("wrapped", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_last_save_before_a_stop_is_tried_again(
    ranks: Ranks, small_disk: Path, wrapped: bool
) -> None:
    codes, job = run(ranks, small_disk, frees=True, stop=1, wrapped=wrapped)
    assert codes == {0: 143, 1: 143}, job.errors(0)
    assert "the last save failed, and is tried again" in job.errors(0)
    assert names(small_disk / "checkpoints")[-1] == trained(job, 0)[-1] + 1, (
        "its own line is not reached"
    )


@pytest.mark.slow
def test_a_request_to_stop_ends_the_attempts(ranks: Ranks, small_disk: Path) -> None:
    plan = {"path": str(small_disk / "checkpoints"), "limit_s": 86400, "grace": 0.5}
    with ranks("last_save", json.dumps(plan)) as job:
        job.start_all()
        wait_for_pause(job)
        job.send(1, signal.SIGTERM)  # all ranks wait for seconds, and then for up to a minute
        assert job.wait_all() == {0: 1, 1: 1}, job.errors(0)
        for rank in range(2):
            assert "after a request to stop (signal SIGTERM)" in job.errors(rank)


@pytest.mark.slow
def test_the_fallback_has_the_last_save_and_the_same_command_continues_there(
    ranks: Ranks, small_disk: Path, tmp_path: Path
) -> None:
    fallback = tmp_path / "second"
    codes, job = run(ranks, small_disk, fallback=str(fallback))
    assert codes == {0: 0, 1: 0}, job.errors(0)
    (folder,) = fallback.iterdir()
    assert f"step 3, the last one, is saved in the fallback {folder}" in job.errors(0)
    (small_disk / "filler").unlink()
    codes, job = run(ranks, small_disk, fallback=str(fallback))
    assert codes == {0: 0, 1: 0}, job.errors(0)
    for rank in range(2):
        begins = [line["step"] for line in job.lines(rank) if line["event"] == "begins"]
        assert begins == [3]
    assert f"continuing after step 3 in the fallback {folder}, newer than" in job.errors(0)
    assert saved(small_disk)[-1].endswith("3")  # there is room again


def fill(disk: Path, leave_bytes: int = 0) -> Path:
    """Fills the disk, but for so many bytes."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    os.truncate(filler, filler.stat().st_size - leave_bytes)
    return filler


def large_job(path: Path, **options: Any) -> outlast.Job:
    """A job whose checkpoints have 256 KiB, and that saves after each step."""
    model = torch.nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"every": 1, "signals": (), "overlap": False, **options}
    return outlast.Job(path, model=model, optimizer=optimizer, **options)


def restored(path: Path, step: int | None = None, **options: Any) -> int:
    job = large_job(path, **options)
    found = job.restore(step=step)
    job.close()
    return found


def train(job: outlast.Job, steps: int) -> None:
    while job.steps < steps:
        job.model.weight.grad = torch.ones(256, 256)
        job.optimizer.step()
        job.step()


@pytest.mark.parametrize("damaged", [False, True])
def test_older_checkpoints_go_first_if_a_newer_one_is_valid(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    monkeypatch.setattr(ending, "LIMIT_S", 0.5)
    path = small_disk / "checkpoints"
    with contextlib.suppress(ending.NotSaved), large_job(path, every=None, keep=2) as job:
        job.restore()
        job.steps = 1
        job.save().wait()
        assert names(path) == [0, 1]
        fill(small_disk, leave_bytes=100_000)
        if damaged:
            flip(path / "step-00000001")
        job.steps = 2
    assert names(path) == ([0, 1] if damaged else [1, 2])


def test_a_damaged_fallback_is_passed_over(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "LIMIT_S", 0.5)
    path = small_disk / "checkpoints"
    options = {"every": None, "fallback": tmp_path / "second"}
    with large_job(path, **options) as job:
        job.restore()
        filler = fill(small_disk)
        job.steps = 2
    filler.unlink()
    assert restored(path.with_name("other"), **options) == 0, "the fallback of another job"
    assert restored(path, step=0, **options) == 0
    assert restored(path, **options) == 2
    (folder,) = (tmp_path / "second").glob("*/step-*")
    flip(folder)
    assert restored(path, **options) == 0


def test_training_goes_on_while_the_disk_is_full(small_disk: Path) -> None:
    path = small_disk / "checkpoints"
    with large_job(path, on_failure=FailurePolicy()) as job:
        job.restore()
        filler = fill(small_disk)
        for steps in (1, 2, 3):
            train(job, steps)
            concurrent.futures.wait([save.handle for save in job.checkpointer.saves.pending])
        filler.unlink()
        train(job, 5)
    assert names(path)[-1] == 5


@pytest.mark.slow
@pytest.mark.usefixtures("zygote")
def test_a_full_disk_ends_the_job_under_the_launcher(tmp_path: Path, small_disk: Path) -> None:
    arguments = json.dumps({"path": str(small_disk / "checkpoints")})
    command = ("outlast.launch", "run", "--standby=0", "--nproc-per-node", "2", str(SCRIPT))
    with Job(tmp_path, "-m", nprocs=1, args=(*command, arguments), spawn=shared().launch) as job:
        job.start_all()
        assert job.wait(0) == 1, job.errors(0)
        printed = job.output(0) + job.errors(0)
    assert printed.count('"event": "begins"') == 2, "no rank was replaced or restarted"
    assert "replacement" not in printed
    assert "step 3, the last one, is in memory only" in printed
