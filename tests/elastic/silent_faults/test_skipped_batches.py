"""`FiniteCheck(on_non_finite="skip")`: a job goes back to a finite checkpoint, leaves out the
batches since, and ends with the weights of a run that has left them out by hand.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import outlast
from outlast.elastic import ElasticLoader, FiniteCheck, ShardedStream
from outlast.elastic.job.epochs import Epochs
from outlast.errors import CheckpointError, NonFinite, SkipBatches
from outlast.events.emitter import MemorySink
from outlast.events.types import BatchesSkipped
from procs import Job, Line

EPOCHS, SAMPLES, BATCH, STEPS = 3, 16, 4, 4  # steps in an epoch
SKIP = FiniteCheck(on_non_finite="skip")


Ranks = Callable[..., Job]


class Killed(BaseException):
    pass


class Data(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index) / SAMPLES)


def loader_of(kind: str) -> Any:
    if kind != "plain":
        return ElasticLoader(Data(), global_batch_size=BATCH)
    generator = torch.Generator().manual_seed(7)
    return DataLoader(Data(), batch_size=BATCH, shuffle=True, generator=generator)


class Training:
    """A training with dropout. `bad` are the numbers of the batches, over all epochs, that are not
    finite. The `kind` "loop" counts its epochs by itself.
    """

    def __init__(self, path: Path, kind: str, bad: Collection[int] = (), **options: Any) -> None:
        self.path, self.kind, self.bad, self.options = path, kind, bad, options
        self.sink = MemorySink()
        self.ends: dict[int, int] = {}  # the step after which each epoch has ended
        self.weights: list[float] = []
        self.samples = 0

    def run(self, skip: Collection[int] = (), end: int = -1) -> None:
        """`skip` are the batches that it leaves out by hand; after `end` steps, it is killed."""
        epochs = loader_of(self.kind)
        batches = [(epoch, inputs) for epoch in range(EPOCHS) for inputs in epochs]
        numbers = {
            (epoch, inputs.square().sum().item()): i for i, (epoch, inputs) in enumerate(batches)
        }
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(), nn.Linear(3, 1))
        loader = loader_of(self.kind)
        options = {"every": 3, "keep": 1, "signals": (), "checks": SKIP, **self.options}
        with outlast.Job(
            self.path,
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loader=None if self.kind == "plain" else loader,
            events=self.sink,
            **options,
        ) as job:
            job.restore()
            for epoch in range(loader.epoch, EPOCHS) if self.kind == "loop" else job.epochs(EPOCHS):
                for inputs in loader if self.kind == "loop" else job.batches(loader):
                    if job.steps == end:
                        raise Killed
                    number = numbers[epoch, inputs.square().sum().item()]
                    if number in skip:
                        continue
                    job.optimizer.zero_grad()
                    model(inputs * (torch.nan if number in self.bad else 1)).mean().backward()
                    job.optimizer.step()
                    job.step(samples=BATCH)
                self.ends[epoch] = job.steps
            self.samples = job.samples
        self.weights = [value for p in model.parameters() for value in p.flatten().tolist()]


def until_complete(job: Training) -> list[str]:
    """Restarts the job as long as it leaves out batches; returns what it said."""
    found = []
    while not job.weights:
        try:
            job.run()
        except SkipBatches as e:
            found.append(str(e))
    return found


FIRST = ([1], [0, 1], ["1 to 2 (time 1"])
OVER_AN_END = ([4], [3, 4], ["4 to 5 (time 1"])  # of an epoch
TWICE = ([5, 6, 10], [3, 4, 5, 6, 10], ["4 to 6 (time 1", "4 to 4 (time 2", "7 to 7 (time 1"])
LAST = ([11], [9, 10, 11], ["10 to 12 (time 1"])  # training is then complete


MORE = [pytest.mark.exhaustive]


# Steps 3, 6, 9 and 12 are saved, and the initial state.
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("elastic", TWICE),
        ("plain", OVER_AN_END),
        *[
            pytest.param(kind, case, marks=[pytest.mark.slow, *more])
            for kind, more in (("loop", []), ("elastic", MORE), ("plain", MORE))
            for case in (FIRST, OVER_AN_END, TWICE, LAST)
        ],
    ],
)
def test_the_weights_are_those_of_a_run_that_leaves_the_batches_out(
    tmp_path: Path, kind: str, case: tuple[list[int], list[int], list[str]]
) -> None:
    bad, skipped, steps = case
    job = Training(tmp_path / "a", kind, bad)
    said = until_complete(job)
    texts = [text.partition("the batches of steps ")[2] for text in said]
    assert [text.removesuffix(" of 2 in a row)") for text in texts] == steps
    by_hand = Training(tmp_path / "b", kind, bad)
    by_hand.run(skip=skipped)
    assert job.weights == by_hand.weights
    assert job.ends == by_hand.ends
    left_out = [event.samples for event in job.sink.events if isinstance(event, BatchesSkipped)]
    assert sum(left_out) == BATCH * len(skipped)
    assert job.samples == BATCH * (EPOCHS * STEPS - len(skipped))


def test_what_was_done_in_earlier_epochs_is_known_after_a_restore() -> None:
    """A state of survivors may be of a later epoch than the checkpoint to which they go back."""
    one, other = (Epochs(None, {}, 0, 1, random=False) for _ in range(2))
    one.may_leave_out, saved = True, {}
    for epoch in one.loop(2):
        for number, _ in enumerate(one.batches(range(3)), 1):
            one.stepped(3 * epoch + number)
            if one.steps == 4:
                saved = one.save()
    other.load(saved, 4)
    assert other.batches_done() == {0: (3,), 1: (1,)}


def test_a_loop_of_restarts_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All batches from the fifth on are not finite; a job that is killed meanwhile goes on."""
    job = Training(tmp_path, "plain", range(4, 12))
    with pytest.raises(SkipBatches, match=r"to step 3, and leaves out the batches of steps 4 to 5"):
        job.run()
    with pytest.raises(Killed):
        job.run(end=3)
    caplog.clear()
    with caplog.at_level(logging.WARNING), pytest.raises(SkipBatches, match=r"4 to 4 \(time 2 of"):
        job.run()
    assert "left out" not in caplog.text  # it was said, and is part of the checkpoint
    with pytest.raises(NonFinite, match="2 times in a row, and no later step than 4 was") as raised:
        job.run()
    assert raised.value.permanent
    assert not isinstance(raised.value, SkipBatches)


def test_all_batches_that_are_left_may_be_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Training(tmp_path, "plain", [11])
    assert len(until_complete(job)) == 1
    assert "complete without the batches of 3 steps (12 samples): with them, values" in caplog.text


def test_it_needs_to_know_the_batches(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    stream = ShardedStream(["a"], lambda *_: [torch.ones(2)], batch_size=1)
    for folder, loader in (("a", None), ("b", stream)):
        job = outlast.Job(tmp_path / folder, loader=loader, checks=SKIP, **parts)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="does not know which batches to leave out"), job:
            job.step()
    with pytest.raises(ValueError, match="needs a Job"):
        SKIP.start(model)
    with pytest.raises(ValueError, match="max_skips"):
        FiniteCheck(max_skips=0)


@pytest.mark.parametrize(
    "skip", [pytest.param({"found": "x"}, marks=pytest.mark.slow), {"epochs": [1]}]
)
def test_a_forged_record_is_named(tmp_path: Path, skip: dict[str, Any]) -> None:
    job = Training(tmp_path, "elastic", [4])
    with pytest.raises(SkipBatches):
        job.run()
    file = tmp_path / "trust" / "limit.json"
    file.write_text(json.dumps({"step": 3, "skip": skip}))
    with pytest.raises(CheckpointError, match=r"trust/limit\.json .* cannot be read"):
        job.run()
    file.unlink()
    job.bad = ()
    job.run()
    assert job.samples == BATCH * EPOCHS * STEPS


@pytest.mark.slow
def test_two_ranks_leave_out_the_same_batches(ranks: Ranks, tmp_path: Path) -> None:
    """Only rank 1 has a sample that is not finite. Rank 0 fails in the step after the restart: both
    go on from the restored state in memory, with what is left out.
    """

    def run(name: str, **plan: Any) -> list[Line]:
        arguments = json.dumps({"path": str(tmp_path / name), **plan})
        with ranks("skipped_batches", arguments, nprocs=2) as job:
            job.start_all()
            codes = job.wait_all()
            assert set(codes.values()) == {0}, [job.errors(rank) for rank in range(2)]
            return [job.lines(rank)[-1] for rank in range(2)]

    by_hand = run("by hand", skip=[4, 5])
    ended = run("job", bad=5, fail_after=4)
    for each, wanted in zip(ended, by_hand, strict=True):
        assert each["weights"] == wanted["weights"]
        assert (each["steps"], each["samples"]) == (10, 80)
