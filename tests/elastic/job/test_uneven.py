"""Ranks that do not make the same steps: a hang found at once, or an error where they meet."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from elastic.small_jobs import job as small_job
from outlast.coordination.training_step import loop
from outlast.events.hung_ranks import BETWEEN, IN_STEP, LEFT, NO_MORE
from procs import Job

Ranks = Callable[..., Job]
ADVICE = "all ranks must make the same number of steps"


class Training:
    """Runs of `uneven.py`, on one folder."""

    def __init__(self, ranks: Ranks, path: Path) -> None:
        self._ranks, self.path = ranks, path
        self.errors = ""

    def run(self, **plan: Any) -> dict[int, int]:
        with self._ranks("uneven", json.dumps({"path": str(self.path), **plan})) as job:
            job.start_all()
            codes = job.wait_all()
            self.each = [job.errors(rank) for rank in range(2)]
            self.errors = "\n".join(self.each)
            self.begins = [
                line["step"]
                for rank in range(2)
                for line in job.lines(rank)
                if line["event"] == "begins"
            ]
        return codes

    @property
    def saved(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in self.path.glob("step-*"))


@pytest.fixture
def training(ranks: Ranks, tmp_path: Path) -> Training:
    return Training(ranks, tmp_path / "checkpoints")


def test_a_job_notes_where_its_loop_is(tmp_path: Path) -> None:
    loader = DataLoader(torch.ones(2, 1))
    found = []

    def note() -> None:
        found.append((loop.made, loop.passes, loop.taken, loop.at))

    with small_job(tmp_path) as job:
        job.restore()
        note()
        for epoch in job.epochs(1):
            for batch in job.batches(loader):
                note()
                job.optimizer.step()
                job.step(samples=len(batch))
                note()
            note()
            for _ in job.batches(loader):  # an evaluation
                note()
            assert job._training.epochs.place == f", epoch {epoch}, 2 + 0 batches"
        job.model(torch.ones(1))
    note()
    steps = [(0, 0, 1, IN_STEP), (1, 0, 1, BETWEEN), (1, 0, 2, IN_STEP), (2, 0, 2, BETWEEN)]
    evaluation = [(2, 1, 2, NO_MORE), (2, 1, 3, IN_STEP), (2, 1, 4, IN_STEP)]
    assert found == [(0, 0, 0, ""), *steps, *evaluation, (2, 3, 4, NO_MORE)]
    loop.begin()
    with small_job(tmp_path) as job:  # without `Job.batches`
        job.restore()
        job.step(samples=1)
        note()
    note()
    assert found[-2:] == [(3, 0, 0, ""), (3, 1, 0, LEFT)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("batches", "rank 1 has no more batches (8 steps), rank 0 is in step 9"),
        # Rank 0 is sampled when its wait is over: what counts is how long it had waited.
        ("woken", "rank 1 has no more batches (8 steps), rank 0 is in step 9"),
        pytest.param(  # without `Job.batches`
            "loop",
            "rank 1 has left its loop (8 steps), rank 0 is in step 9",
            marks=pytest.mark.slow,
        ),
        ("swallows", "rank 1 has no more batches (9 steps), rank 0 is in step 10"),
        pytest.param(
            "skips",
            "rank 1 has no more batches (9 steps), rank 0 is in step 10",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_without_more_batches_is_a_hang_at_the_soft_timeout(
    training: Training, how: str, said: str
) -> None:
    """It waits in its last save, a long phase of half an hour; the other one in its backward pass.
    No restart helps.
    """
    assert training.run(how=how) == {0: 93, 1: 93}, training.errors
    assert training.begins == [0, 0], training.errors
    assert said in training.errors
    assert ADVICE in training.errors
    # The last step of all ranks is saved before the end, unless it is at another batch on each.
    assert training.saved == ([0, 8] if how == "loop" else [0])
    assert how == "loop" or "ranks that have made the same steps: rank 0, epoch 1" in (
        training.errors
    )
    warned = "batches in this epoch, and rank" in training.errors  # at the first step
    assert warned == (how in ("batches", "woken"))


@pytest.mark.slow
@pytest.mark.parametrize(("how", "step"), [("saves", 3), ("saves at the end", 5)])
def test_a_save_on_one_rank_ends_the_job(training: Training, how: str, step: int) -> None:
    """A restart would go on without it, and the job would end with exit code 0."""
    assert training.run(how=how) == {0: 93, 1: 93}, training.errors
    assert training.begins == [0, 0], training.errors
    said = f"rank 0 waits in job.save(), after step {step}, which rank 1 did not call; call"
    assert said in training.errors


@pytest.mark.slow
@pytest.mark.parametrize("how", ["forgets", "phase"])
def test_a_wait_for_a_rank_that_never_comes_is_a_hang(training: Training, how: str) -> None:
    """In `restore`; in a collective of the program, in a long phase without a limit."""
    assert training.run(how=how) == {0: 93, 1: 93}, training.errors
    assert "no progress" in training.errors


@pytest.mark.slow
@pytest.mark.parametrize("slow", [("write", 1), ("_publish", 0)])
def test_a_rank_that_works_is_waited_for(training: Training, slow: tuple[str, int]) -> None:
    """One rank writes its files, or commits, for three soft timeouts; the other one waits."""
    assert training.run(slow=slow, soft=4.0) == {0: 0, 1: 0}, training.errors
    assert training.begins == [0, 0], training.errors
    assert training.saved[-1] == 10


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("how", ["batches", "iterable"])
def test_inside_of_join_the_end_is_refused(training: Training, how: str, wrapped: bool) -> None:
    codes = training.run(how=how, joined=True, wrapped=wrapped)
    assert codes == dict.fromkeys(range(2), 93 if wrapped else 1), training.errors
    for errors in training.each if not wrapped else [training.errors]:
        assert "rank 0: 10 steps, epoch 2; rank 1: 8 steps, epoch 2; " + ADVICE in errors
    assert training.saved == [0]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_inside_of_join_the_first_uneven_save_is_refused(training: Training, overlap: bool) -> None:
    """Both ranks save step 6: one after the first batch of the epoch, one after the second."""
    codes = training.run(how="batches", joined=True, every=2, overlap=overlap)
    assert codes == {0: 93, 1: 93}, training.errors
    assert "6 steps, epoch 1, 1 batches" in training.errors
    assert "6 steps, epoch 1, 2 batches" in training.errors
    assert ADVICE in training.errors
    assert "written to while" not in training.errors
    assert training.saved == [2, 4]


@pytest.mark.slow
def test_inside_of_join_a_save_that_needs_all_ranks_is_refused(training: Training) -> None:
    """Where its structure is new, all ranks divide it, and the other rank waits in `join()`: a
    hang. Else it is the first uneven save.
    """
    assert training.run(how="batches", joined=True, every=5) == {0: 93, 1: 93}, training.errors
    hang = "rank 1 has no more batches (4 steps), rank 0 has made 5" in training.errors
    assert hang or "5 steps, epoch 1, 1 batches" in training.errors
    assert ADVICE in training.errors
    assert training.saved == ([0, 5] if hang else [0])  # in a hang, rank 0 alone is at step 5


@pytest.mark.slow
def test_uneven_ranks_are_no_fault_of_the_hardware(training: Training) -> None:
    codes = training.run(how="batches", joined=True, checks=True)
    assert codes == {0: 93, 1: 93}, training.errors
    assert "UnevenRanks" in training.errors
    assert "ReplicasDiffer" not in training.errors
