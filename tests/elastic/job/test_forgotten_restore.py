"""A job that forgot `restore()` replaces no checkpoint; a mistake that no restart mends ends it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import outlast
from elastic.small_jobs import job
from procs import Job


def steps_in(path: Path) -> list[int]:
    with outlast.Checkpointer(path) as checkpointer:
        return [info.step for info in checkpointer.checkpoints()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder with the checkpoint of step 7."""
    with job(tmp_path) as one:
        for _ in range(7):  # an empty folder: there is nothing to restore
            one.step()
    assert steps_in(tmp_path) == [7]
    return tmp_path


@pytest.mark.parametrize("first", [lambda job: job.step(), lambda job: job.save()])
def test_a_job_that_forgot_to_restore_saves_nothing(
    path: Path, first: Callable[[outlast.Job], object]
) -> None:
    def train() -> None:
        with job(path, every=1) as one:
            first(one)

    message = rf"^{path} has checkpoints up to step 7, and this job is at step 0.*job\.restore\(\)"
    with pytest.raises(ValueError, match=message):
        train()
    assert steps_in(path) == [7]


def test_a_restored_job_saves(path: Path) -> None:
    with job(path, every=1) as one:
        assert one.restore() == 7
        one.step()
    assert steps_in(path) == [7, 8]


def test_a_job_that_continues_by_its_own_means_saves(path: Path) -> None:
    """It has loaded what it needs with other code, and set the step."""
    with job(path, every=1) as one:
        one.steps = 7
        one.step()
    assert steps_in(path) == [7, 8]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("no restore", "has checkpoints up to step 5, and this job is at step 0"),
        ("other model", "'model.bias' has shape (3,), (2,) was saved"),
        ("unsavable", "'states.notes.last' cannot be saved: a lambda"),
    ],
)
def test_a_wrapped_job_ends_at_once_with_the_cause(
    ranks: Callable[..., Job], tmp_path: Path, mistake: str, message: str
) -> None:
    def run(mistake: str) -> tuple[set[int], list[dict[str, Any]], list[str]]:
        with ranks("misfits", str(tmp_path / "saved"), mistake, nprocs=2) as processes:
            processes.start_all()
            codes = set(processes.wait_all().values())
            lines = [line for rank in range(2) for line in processes.lines(rank)]
            return codes, lines, [processes.errors(rank) for rank in range(2)]

    assert run("none")[0] == {0}
    codes, lines, errors = run(mistake)
    assert codes == {93}, "\n".join(errors)
    assert {line["iteration"] for line in lines} == {0}
    assert any(message in error for error in errors)
    assert steps_in(tmp_path / "saved") == [4, 5]
