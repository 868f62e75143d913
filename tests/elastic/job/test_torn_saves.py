"""Programs that write to parameters before the optimizer's step, such as sharpness-aware
minimization (SAM): a snapshot that such a write has torn is replaced by an eager one.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import outlast
from elastic.small_jobs import job as small_job
from outlast.coordination.agreement import Agreement
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.store import MemoryStore
from outlast.elastic.job.saves import SaveAgain
from outlast.errors import TornSnapshot
from procs import Job

Ranks = Callable[..., Job]
WARNING = "written to before the optimizer's step"


def steps(job: outlast.Job, end: int, first: int = 1) -> dict[int, float]:
    """Trains up to the step `end`, from the step `first` on with SAM; the weights of each step."""
    weight, found = job.model.weight, {0: job.model.weight.item()}
    while job.steps < end:
        if job.steps + 1 >= first:
            job.model(torch.ones(1)).square().sum().backward()
            with torch.no_grad():
                before = weight.clone()
                weight.add_(weight.grad, alpha=0.05)
        job.optimizer.zero_grad()
        job.model(torch.ones(1)).square().sum().backward()
        if job.steps + 1 >= first:
            with torch.no_grad():
                weight.copy_(before)
        job.optimizer.step()
        job.step()
        found[job.steps] = weight.item()
    return found


def saved(path: Path) -> list[int]:
    return sorted(map(step_of, path.glob("step-*")))


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("first", [1, 8])
def test_a_torn_save_is_made_again_and_later_ones_are_eager(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, every: int, first: int
) -> None:
    with small_job(tmp_path, every=every, keep=100, max_in_flight=2) as job:
        job.restore()
        weights = steps(job, 12, first)
    torn = next(step for step in range(every, 12, every) if step + 1 >= first)
    again = set(saved(tmp_path)) - {*range(0, 13, every)}
    assert len(again) == (every == 3)
    assert again <= {torn + 1, torn + 2}
    assert saved(tmp_path) == sorted({*range(0, 13, every)} - {torn} | again)
    (warning,) = warnings(caplog)
    assert f"the save of step {torn} failed" in warning
    assert f"'model.weight' was {WARNING}" in warning
    for step in saved(tmp_path):
        with small_job(tmp_path) as job:
            assert job.restore(step) == step
            assert job.model.weight.item() == weights[step]


def test_a_handle_of_a_torn_save_has_the_error(tmp_path: Path) -> None:
    with small_job(tmp_path) as job:
        job.restore()
        steps(job, 2)
        handle = job.save(metric=1.0)
        steps(job, 3)
        with pytest.raises(TornSnapshot, match=WARNING):
            handle.result(60)
        with torch.no_grad():
            job.save()
            job.model.weight.add_(1.0)  # it was copied at once
        job.checkpointer.wait(60)
    assert saved(tmp_path) == [0, 3]


def test_a_save_of_the_same_step_replaces_a_torn_one(tmp_path: Path) -> None:
    with small_job(tmp_path) as job:
        job.restore()
        steps(job, 2)
        job.save()
        with torch.no_grad():
            job.model.weight.add_(1.0)
        job.save()
    assert saved(tmp_path) == [0, 2]
    with small_job(tmp_path) as again:
        again.restore()
        assert again.model.weight.item() == job.model.weight.item()


def test_without_a_later_save_the_error_is_raised(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    job.restore()
    steps(job, 2)
    job.save()
    with torch.no_grad():
        job.model.weight.add_(1.0)
    with pytest.raises(TornSnapshot):
        job.close()
    assert saved(tmp_path) == [0]


@pytest.mark.parametrize("ranks_that_write", [[0, 1], [0], [1]])
@pytest.mark.parametrize("first", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_all_ranks_save_again_after_the_same_step(
    tmp_path: Path, ranks: Ranks, ranks_that_write: list[int], first: int
) -> None:
    """Also if the snapshot of one of them is torn. Nothing restarts."""
    path = tmp_path / "checkpoints"
    plan = {"path": str(path), "ranks": ranks_that_write, "first": first, "end": 14}
    with ranks("perturbed", json.dumps({**plan, "every": 4, "overlap": True})) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}
        ended = [job.lines(rank)[-1] for rank in range(2)]
        errors = "".join(job.errors(rank) for rank in range(2))
    assert [each["iteration"] for each in ended] == [0, 0]
    torn = 4 if first == 1 else 8
    assert errors.count(WARNING) == 1
    assert f"the save of step {torn} failed" in errors
    again = set(saved(path)) - {0, 4, 8, 12, 14}
    assert len(again) == 1
    assert again <= {torn + 1, torn + 2}
    assert {4, 8, 12} - {*saved(path)} == {torn}
    # From the save that replaces it, the training ends with the same bits.
    for each in path.glob("step-*"):
        if step_of(each) > min(again):
            shutil.rmtree(each)
    with ranks("perturbed", json.dumps({**plan, "every": None, "overlap": False})) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}
        assert [job.lines(rank)[-1]["total"] for rank in range(2)] == [e["total"] for e in ended]


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_agree_on_the_step(seed: int) -> None:
    """Whenever each of them learns that a snapshot was torn."""
    store, chance = MemoryStore(), random.Random(seed)
    agreements = [Agreement(CallLedger(store, "again", r, 3), 60.0, "here") for r in range(3)]
    ranks = [SaveAgain(each) for each in agreements]
    collective = threading.Barrier(3)
    moments = [chance.uniform(0.0, 0.02) for _ in ranks]
    pauses = [[chance.choice([0.0, 0.002]) for _ in range(20)] for _ in ranks]
    due: list[list[int]] = [[], [], []]

    def train(rank: int) -> None:
        asks = threading.Timer(moments[rank], ranks[rank].ask)
        asks.start()
        for step in range(1, 21):
            collective.wait(60)
            time.sleep(pauses[rank][step - 1])
            if ranks[rank].is_due(step):
                due[rank].append(step)
        asks.join()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert due[0] == due[1] == due[2]
    assert len(due[0]) <= 1
