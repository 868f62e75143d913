"""The last save of a job fails: what was trained is not given up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


def trained(job: Job, rank: int) -> list[int]:
    return [line["step"] for line in job.lines(rank) if line["event"] == "trained"]


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
        assert "step 3, the last one, is in memory only: 3 attempts to save it have" in errors
        assert "No space left on device" in errors
        assert f"On storage in {small_disk / 'checkpoints'}: step 0. The failure: " in errors
        assert f"Make room in {small_disk / 'checkpoints'}, or use another folder" in errors
        assert "posix_fallocate" not in errors  # the traceback of the writer
    assert len(saved(small_disk)) == 1


def test_the_last_save_is_tried_again(ranks: Ranks, small_disk: Path) -> None:
    codes, job = run(ranks, small_disk, frees=True)
    assert codes == {0: 0, 1: 0}, job.errors(0)
    for rank in range(2):
        assert trained(job, rank) == STEPS
        assert [line["step"] for line in job.lines(rank) if line["event"] == "ended"] == [3]
    assert "the last save failed, and is tried again" in job.errors(0)
    assert saved(small_disk)[-1].endswith("3")


@pytest.mark.slow
@pytest.mark.usefixtures("zygote")
def test_a_full_disk_ends_the_job_under_the_launcher(tmp_path: Path, small_disk: Path) -> None:
    arguments = json.dumps({"path": str(small_disk / "checkpoints")})
    command = ("outlast.launch", "run", "--standby=0", "--nproc-per-node", "2", str(SCRIPT))
    with Job(tmp_path, "-m", nprocs=1, args=(*command, arguments), spawn=shared().spawn) as job:
        job.start_all()
        assert job.wait(0) == 1, job.errors(0)
        printed = job.output(0) + job.errors(0)
    assert printed.count('"event": "begins"') == 2, "no rank was replaced or restarted"
    assert "replacement" not in printed
    assert "step 3, the last one, is in memory only" in printed
