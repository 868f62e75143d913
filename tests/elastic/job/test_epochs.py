"""`Job.epochs` and `Job.batches` in one process: what a job that continues does again."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import outlast
from outlast.elastic import ElasticLoader, ShardedStream
from outlast.elastic.job.epochs import Epochs
from outlast.errors import CheckpointMismatch, RankShouldRestart

EPOCHS, SAMPLES, BATCH, STEPS = 3, 10, 3, 4  # steps in an epoch


class Killed(BaseException):
    pass


class Data(Dataset[torch.Tensor]):
    loaded: list[int]

    def __init__(self) -> None:
        self.loaded = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded.append(index)
        return torch.tensor([float(index)])


class Augmented(Data):
    """Changes its samples at random, with each of the generators, and with one more draw for some
    samples than for others.
    """

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + np.random.rand() + torch.rand(1 + index % 2).sum()
        return super().__getitem__(index) + noise


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randperm(SAMPLES).float()[:, None])


def own(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def replaced(data: Data) -> RandomSampler:
    return RandomSampler(data, replacement=True, num_samples=SAMPLES, generator=own())


def items(shard: str, offset: int) -> Iterator[torch.Tensor]:
    return iter(torch.arange(offset, SAMPLES)[:, None].float())


LOADERS: dict[str, Any] = {
    "shuffled": lambda data: DataLoader(data, BATCH, shuffle=True),
    "own generator": lambda data: DataLoader(data, BATCH, shuffle=True, generator=own()),
    "replacement": lambda data: DataLoader(data, BATCH, sampler=replaced(data)),
    "distributed": lambda data: DataLoader(
        data, BATCH, sampler=DistributedSampler(data, num_replicas=1, rank=0)
    ),
    "iterable": lambda data: DataLoader(Stream(), BATCH),
    "list": lambda data: [torch.full((1, 1), float(i)) for i in range(STEPS)],
    "elastic": lambda data: ElasticLoader(data, global_batch_size=BATCH, rank=0, replicas=1),
    "sharded": lambda data: ShardedStream(["a"], items, batch_size=BATCH, rank=0, replicas=1),
    "workers": lambda data: DataLoader(Augmented(), BATCH, shuffle=True, num_workers=2),
    "persistent": lambda data: DataLoader(
        Augmented(), BATCH, generator=own(), num_workers=2, persistent_workers=True
    ),
    "iterable persistent": lambda data: DataLoader(
        Stream(), BATCH, num_workers=1, persistent_workers=True
    ),
    "single": lambda data: DataLoader(Augmented(), None, sampler=range(STEPS), num_workers=2),
    "elastic augmented": lambda data: ElasticLoader(
        Augmented(), global_batch_size=BATCH, rank=0, replicas=1
    ),
    "elastic workers": lambda data: ElasticLoader(
        Augmented(), global_batch_size=BATCH, rank=0, replicas=1, num_workers=2
    ),
}
FAST = ("shuffled",)


def job_with(path: Path, loader: Any = None, **options: Any) -> outlast.Job:
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    given = {"every": 1, "signals": (), "keep": 1, "states": {"scheduler": scheduler}, **options}
    return outlast.Job(path, model=model, optimizer=optimizer, loader=loader, **given)


def train_on(job: outlast.Job, batch: Any) -> None:
    job.optimizer.zero_grad()
    (job.model(batch) + torch.rand(1)).square().mean().backward()
    job.optimizer.step()


def train(path: Path, kind: str, seed: int, end: Any = None) -> list[Any]:
    """Trains to the end, or to the point `end`; returns what has happened."""
    for seed_all in (random.seed, np.random.seed, torch.manual_seed):
        seed_all(seed)
    loader = LOADERS[kind](Data())
    happened: list[Any] = []

    def reach(*point: Any) -> None:
        happened.append(point)
        if point[0] == "end":
            leave()

    def leave() -> None:  # once the loop has come back: the step is saved
        if happened and happened[-1][:2] == end:
            job.checkpointer.wait()
            raise Killed

    try:
        own_position = isinstance(loader, ElasticLoader | ShardedStream)
        with job_with(path, loader if own_position else None) as job:
            job.restore()
            for epoch in job.epochs(EPOCHS):
                torch.rand(epoch)  # before the batches: drawn again within the epoch
                for batch in job.batches(loader):
                    leave()
                    train_on(job, batch)
                    job.step()
                    weight = next(job.model.parameters()).item()
                    reach("step", job.steps, epoch, batch.flatten().tolist(), weight)
                leave()
                job.states["scheduler"].step()
                rate = job.states["scheduler"].get_last_lr()
                reach("end", epoch, torch.rand(1).item(), rate)
    except Killed:
        pass
    return happened


@pytest.mark.slow
# torch does not know that the restored optimizer has made steps.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    "kind",
    [k if k in FAST else pytest.param(k, marks=pytest.mark.slow) for k in LOADERS],
)
def test_a_job_that_continues_does_what_is_left(tmp_path: Path, kind: str) -> None:
    expected = train(tmp_path / "undisturbed", kind, 0)
    assert len(expected) == EPOCHS * (STEPS + 1)
    ends = [("step", 2), ("step", STEPS), ("end", 0), ("step", STEPS + 1), ("end", EPOCHS - 1)]
    for end in ends:
        path = tmp_path / str(end)
        before = train(path, kind, 0, end)
        assert before[-1][:2] == end
        after = train(path, kind, 1)
        again = 1 if end[0] == "end" else 0  # the end of the epoch; no batch
        assert before + after[again:] == expected, end
        assert after[:again] == before[len(before) - again :]
        assert train(path, kind, 2) == [], "it is finished"


def stopped(path: Path, loaders: list[Any], steps: int, **options: Any) -> None:
    """Makes these steps, in loops over the loaders one after another, and dies."""
    with pytest.raises(Killed), job_with(path, **options) as job:

        def leave() -> None:  # once the loop has come back: the step is saved
            if job.steps == steps:
                job.checkpointer.wait()
                raise Killed

        job.restore()
        for _ in job.epochs(EPOCHS):
            for loader in loaders:
                for _ in job.batches(loader):
                    leave()
                    job.step()
                leave()


def test_what_is_done_is_not_loaded_again(tmp_path: Path) -> None:
    stopped(tmp_path, [DataLoader(Data(), BATCH)], 2)
    data = Data()
    with job_with(tmp_path) as job:
        assert job.restore() == 2
        for _ in job.epochs(1):
            assert len(list(job.batches(DataLoader(data, BATCH)))) == STEPS - 2
    assert data.loaded == list(range(2 * BATCH, SAMPLES))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torchdata
@pytest.mark.parametrize("saved", ["in the last step", "after the last batch"])
def test_a_loader_with_a_state_that_was_resumed_at_its_end_begins_the_next_epoch(
    tmp_path: Path, saved: str
) -> None:
    def seen(epochs: int, *, dies: bool = False) -> list[tuple[int, float]]:
        loader = StatefulDataLoader(Data(), BATCH)
        found = []
        with job_with(tmp_path, loader) as job:
            job.restore()
            for epoch in job.epochs(epochs):
                for batch in job.batches(loader):
                    job.step()
                    found.append((epoch, batch[0].item()))
                if dies and epoch == epochs - 1:
                    if saved == "after the last batch":
                        job.save()
                    job.checkpointer.wait()
                    raise Killed(found)
        return found

    of_epochs = [[(epoch, float(n)) for n in range(0, SAMPLES, BATCH)] for epoch in range(3)]
    with pytest.raises(Killed) as killed:
        seen(2, dies=True)
    assert killed.value.args == (of_epochs[0] + of_epochs[1],)
    assert seen(2) == []  # the end of the epoch again; saved with no batch left
    assert seen(3) == of_epochs[2]


def test_an_evaluation_is_repeated_by_any_number_of_ranks() -> None:
    before, now = (Epochs(None, {}, 0, size, random=False) for size in (2, 1))
    for _ in before.loop(1):
        assert list(before.batches([1, 2])) == [1, 2]
        saved = before.save()
    now.load(saved, 5)
    for _ in now.loop(1):
        assert list(now.batches([1, 2, 3, 4])) == [1, 2, 3, 4]


def test_two_loops_in_one_epoch(tmp_path: Path) -> None:
    stopped(tmp_path, [[1, 2, 3], [4, 5, 6]], 5)
    with job_with(tmp_path) as job:
        job.restore()
        seen = []
        for epoch in job.epochs(2):
            for values in ([1, 2, 3], [4, 5, 6]):
                for value in job.batches(values):
                    # An evaluation in between is whole, and no part of the epoch's position.
                    assert list(job.batches([7, 8])) == [7, 8]
                    seen.append((epoch, value))
                    job.step()
    assert seen == [(0, 6), *((1, value) for value in range(1, 7))]


def test_a_finished_job_goes_on_with_more_epochs(tmp_path: Path) -> None:
    seen = []
    for end in (2, 2, 1, 3):
        with job_with(tmp_path) as job:
            job.restore()
            for epoch in job.epochs(end):
                seen.append(epoch)
                for _ in job.batches(range(2)):
                    job.step()
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("kind", FAST)
def test_a_job_that_has_left_the_loop_is_complete(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def trained(epochs: int) -> tuple[list[int], int]:
        loader = LOADERS[kind](Data())
        with job_with(tmp_path, loader if kind == "elastic" else None) as job:
            job.restore()
            seen: list[int] = []
            for epoch in job.epochs(epochs):
                seen.append(epoch)
                for batch in job.batches(loader):
                    train_on(job, batch)
                    job.step()
                if len(seen) == 2:  # early stopping
                    break
            return seen, job.steps

    assert trained(5) == ([0, 1], 2 * STEPS)
    assert trained(5) == ([], 2 * STEPS)
    assert "left the loop over job.epochs(5) before its end" in caplog.text
    assert trained(6) == ([2, 3], 4 * STEPS)


def test_a_test_at_the_beginning_of_a_resumed_epoch_that_ends_the_training_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for stops in (False, True):
        loader = LOADERS["shuffled"](Data())
        with contextlib.suppress(Killed), job_with(tmp_path) as job:
            job.restore()
            for _ in job.epochs(2):
                if stops:
                    break
                for batch in job.batches(loader):
                    if job.steps == 2:
                        raise Killed
                    train_on(job, batch)
                    job.step()
        said = "in epoch 0, which is resumed after step 1, before the batches that are left"
        assert (said in caplog.text) == stops


def test_misuse(tmp_path: Path) -> None:
    with job_with(tmp_path) as job:
        job.restore()
        with pytest.raises(ValueError, match=r"call it in a loop over job\.epochs"):
            job.batches([1])
        for _ in job.epochs(1):
            with pytest.raises(ValueError, match="whose position the job does not save"):
                job.batches(ElasticLoader(Data(), global_batch_size=1, rank=0, replicas=1))
            for _ in job.batches([1, 2]):
                for _ in job.batches([3]):
                    with pytest.raises(ValueError, match="within another one"):
                        job.step()


def test_another_loader_than_that_of_the_restored_step_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path, [[1, 2, 3]], 2)
    with job_with(tmp_path) as job:
        job.restore()
        for _ in job.epochs(1):
            with pytest.raises(ValueError, match="saved after 2 batches of a loader with 3"):
                job.batches([1, 2, 3, 4])


def test_another_number_of_ranks(tmp_path: Path) -> None:
    """Refused within a loader of which only each rank's batches are known; not at its end."""
    stopped(tmp_path, [[1, 2, 3]], 2)
    with job_with(tmp_path) as job:
        job._training.epochs._world_size = 2
        with pytest.raises(CheckpointMismatch, match="saved by 1 ranks, after 2 of 3 batches"):
            job.restore()
    stopped(tmp_path / "end", [[1, 2, 3]], 3)
    with job_with(tmp_path / "end") as job:
        job._training.epochs._world_size = 2
        job.restore()
        assert [len(list(job.batches([1, 2]))) for _ in job.epochs(2)] == [0, 2]


def test_another_number_of_ranks_continues_an_order_over_all_ranks(tmp_path: Path) -> None:
    """With a `DistributedSampler`, as long as the batches of all ranks have as many samples."""
    data: Any = list(range(24))
    order = list(DistributedSampler(data, 1, 0, seed=3))

    def taken(rank: int, size: int, batch: int, *, steps: int = 0) -> list[list[int]]:
        loader = DataLoader(data, batch, sampler=DistributedSampler(data, size, rank, seed=3))
        found: list[list[int]] = []
        with pytest.raises(Killed), job_with(tmp_path) as job:
            job._training.epochs._world_size = size
            job.restore()
            for one in job._training.epochs._passes:
                (one._noted or {}).pop("order", None)  # that of rank 0
            for _ in job.epochs(1):
                for each in job.batches(loader):
                    if steps and len(found) == steps:
                        job.checkpointer.wait()
                        raise Killed
                    found.append(each.tolist())
                    if len(found) == steps:
                        job.step()
            raise Killed
        return found

    assert taken(0, 2, 3, steps=1) == [order[:6:2]]
    for size in (1, 2, 3):
        shares = [taken(rank, size, 6 // size) for rank in range(size)]
        left = [sorted(n for share in step for n in share) for step in zip(*shares, strict=True)]
        assert left == [sorted(order[at : at + 6]) for at in (6, 12, 18)]
    with pytest.raises(CheckpointMismatch, match=r"1 batches of 6 samples .* now they have 9"):
        taken(0, 3, 3)


def test_a_break_after_a_step_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with job_with(tmp_path) as job, caplog.at_level(logging.WARNING, "outlast"):
        job.restore()
        for _ in job.epochs(2):
            for value in job.batches([1, 2, 3]):
                if value == 3:
                    break
                job.step()
        assert not [m for m in caplog.messages if "was left right after" in m]
        for _ in job.epochs(4):
            for _ in job.batches([1, 2, 3]):
                job.step()
                break
        assert len([m for m in caplog.messages if "was left right after" in m]) == 1


def test_an_interrupt_at_a_loop_that_an_exception_leaves_is_raised_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The abort of a restart makes a collective raise while the interrupt is on its way. The
    exception closes the loop's generators, in which the interrupt would be lost, with a traceback.
    """
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: ignored.append(error.exc_value))
    interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
    thread = ctypes.c_ulong(threading.get_ident())
    shouldrestart = ctypes.py_object(RankShouldRestart)

    def collective() -> None:  # in C: the second call of this `map` raises
        set(map(interrupt, [thread, object()], [shouldrestart, shouldrestart]))

    with job_with(tmp_path) as job:
        job.restore()
        for _ in job.epochs(2):
            landed = False
            try:
                try:
                    for _ in job.batches([1, 2, 3]):
                        job.step()
                        collective()
                except ctypes.ArgumentError:
                    for _ in range(2):
                        pass
            except RankShouldRestart:
                landed = True
            assert landed
            assert not ignored
            (left,) = job._training.epochs._passes
            assert (left.is_open, left.is_over, left.was_left) == (False, True, True)
            break


@pytest.mark.slow
@pytest.mark.parametrize("how", ["made anew", "kept", "set for each epoch"])
def test_a_save_at_the_end_of_an_epoch_keeps_the_order_of_the_next_one(
    tmp_path: Path, how: str
) -> None:
    """Also where the loader draws it from a generator of its own."""
    data = Data()

    def make() -> DataLoader[Any]:
        return DataLoader(data, BATCH, shuffle=True, generator=own())

    def trained(path: Path, kept: Any, killed: int | None) -> list[int]:
        loader, data.loaded = kept or make(), []
        with contextlib.suppress(Killed), job_with(path, every=None) as job:
            job.restore()
            for epoch in job.epochs(EPOCHS):
                if how == "set for each epoch":
                    loader.generator.manual_seed(epoch)
                for batch in job.batches(loader):
                    if job.steps == killed:
                        job.checkpointer.wait()
                        raise Killed
                    train_on(job, batch)
                    job.step()
                job.save()
        return data.loaded

    reference = trained(tmp_path / "reference", None, None)
    kept = make() if how == "kept" else None
    trained(tmp_path / "c", kept, 2 * STEPS + 1)
    assert trained(tmp_path / "c", kept, None) == reference[2 * SAMPLES :]


class Ends:
    """Counts the ends of epochs."""

    done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


@pytest.mark.parametrize("how", ["killed", "break", "last"])
def test_a_save_at_the_end_of_an_epoch_has_all_of_it(tmp_path: Path, how: str) -> None:
    """It begins when the loop comes back, or with the end of the job."""
    ends, handles = Ends(), []
    options: dict[str, Any] = {"every": None, "states": {"ends": ends}}
    job = job_with(tmp_path, **options)
    with pytest.raises(Killed) if how == "killed" else contextlib.nullcontext(), job:
        job.restore()
        for _ in job.epochs(1 if how == "last" else 2):
            for _ in job.batches([1]):
                if job.epoch:
                    assert handles[0].result() == 1
                    raise Killed
                job.step()
            handles.append(job.save(metric=1.0))
            with pytest.raises(ValueError, match="begins when what it is a part of is over"):
                handles[-1].wait()
            ends.done += 1
            if how == "break":
                break
    assert handles[0].result() == 1
    info = job.checkpointer.checkpoints()[-1]
    assert (info.step, info.metric) == (1, 1.0)
    ends.done = 0
    with job_with(tmp_path, **options) as job:
        job.restore()
        assert ends.done == 1
        assert list(job.epochs(2)) == ([] if how == "break" else [1])


def test_a_checkpoint_of_a_job_without_epochs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with job_with(tmp_path) as job:
        job.restore()
        job.step()
    with caplog.at_level(logging.WARNING, "outlast"), job_with(tmp_path) as job:
        assert job.restore() == 1
        assert list(job.epochs(2)) == [0, 1]
    assert "does not say in which epoch it was saved" in caplog.text
    with job_with(tmp_path / "other") as job:
        job.restore()
        job.epoch = 3
        assert list(job.epochs(5)) == [3, 4]


def side_by_side(path: Path, seed: int, longer: int = 0, end: int = -1) -> Any:
    """Trains on pairs of batches, up to the step `end`; the second loader may be longer."""
    torch.manual_seed(seed)
    one = DataLoader(Data(), BATCH, shuffle=True)
    other = DataLoader(torch.arange(SAMPLES + longer * BATCH), BATCH, shuffle=True)
    seen: list[Any] = []
    with contextlib.suppress(Killed), job_with(path) as job:
        job.restore()
        for epoch in job.epochs(EPOCHS):
            for first, second in zip(job.batches(one), job.batches(other), strict=False):
                if job.steps == end:
                    job.checkpointer.wait()
                    raise Killed
                job.step()
                seen.append((epoch, first.flatten().tolist(), second.flatten().tolist()))
            seen.append((epoch, torch.rand(1).item()))
    return seen


@pytest.mark.parametrize("longer", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, -1))])
def test_loops_over_two_loaders_at_once(tmp_path: Path, longer: int) -> None:
    whole = side_by_side(tmp_path / "whole", 0, longer)
    per_epoch = STEPS + min(longer, 0)
    assert len(whole) == EPOCHS * (per_epoch + 1)
    for end in range(1, EPOCHS * per_epoch):
        path = tmp_path / str(end)
        before = side_by_side(path, 0, longer, end=end)
        after = side_by_side(path, 1, longer)
        again = end % per_epoch == 0  # the end of the epoch
        assert before[: len(before) - again] + after == whole, end
