"""A job continues the order of a sampler, or says that it cannot."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

import outlast

SAMPLES, BATCH = 12, 3


class Killed(BaseException):
    pass


class Own(Sampler[int]):
    """Shuffles by a generator of its own."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.source: Any = torch.Generator().manual_seed(5)
        if kind == "numpy":
            self.source = np.random.default_rng(5)
        elif kind == "in place":
            self.source = random.Random(5)
        self.order = list(range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        if self.kind == "in place":
            self.source.shuffle(self.order)
            return iter(self.order)
        if self.kind == "numpy":
            return iter(self.source.permutation(SAMPLES).tolist())
        return iter(torch.randperm(SAMPLES, generator=self.source).tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"source": self.source.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.set_state(state["source"])


def run(path: Path, kind: str, *, stop: int = -1, in_states: bool, workers: int) -> list[Any]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = Own(kind)
    data: Any = torch.arange(float(SAMPLES)).reshape(SAMPLES, 1)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=workers)
    states = {"sampler": sampler} if in_states else {}
    parts = {"model": model, "optimizer": optimizer, "states": states}
    found = []
    with (
        contextlib.suppress(Killed),
        outlast.Job(path, every=1, signals=(), **parts) as job,
    ):
        job.restore()
        for epoch in job.epochs(2):
            for batch in job.batches(loader):
                if job.steps == stop:
                    job.checkpointer.wait()
                    raise Killed
                found.append((epoch, batch.flatten().int().tolist()))
                optimizer.step()
                job.step()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("in_states", [False, True])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_generator_under_any_name(tmp_path: Path, in_states: bool, workers: int) -> None:
    whole = run(tmp_path / "whole", "torch", in_states=in_states, workers=workers)
    for stop in (1, 5):
        path = tmp_path / str(stop)
        first = run(path, "torch", stop=stop, in_states=in_states, workers=workers)
        assert len(first) < len(whole)
        assert first + run(path, "torch", in_states=in_states, workers=workers) == whole


@pytest.mark.parametrize("kind", ["numpy", "in place"])
def test_another_order_is_an_error(tmp_path: Path, kind: str) -> None:
    run(tmp_path, kind, stop=5, in_states=False, workers=0)
    with pytest.raises(ValueError, match="the sampler gives another order than before: its first"):
        run(tmp_path, kind, in_states=False, workers=0)


@pytest.mark.parametrize(
    ("samples", "batch", "shuffle", "error"),
    [
        (
            8,
            4,
            True,
            "after 2 batches of a loader with 4, and now .* has 2 .*: unknown.. The loader",
        ),
        (16, 4, True, "another order than before: .* and others skipped. The loader"),
        (8, 2, False, "another order than before: .* and others skipped. The loader"),
    ],
)
def test_what_has_changed_of_a_loader_is_named(
    tmp_path: Path, samples: int, batch: int, shuffle: bool, error: str
) -> None:
    def train(loader: DataLoader[Any], steps: int) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            contextlib.suppress(Killed),
            outlast.Job(tmp_path, model=model, optimizer=optimizer, every=1, signals=()) as job,
        ):
            job.restore()
            for _ in job.epochs(1):
                for _ in job.batches(loader):
                    job.step()
                    if job.steps == steps:
                        job.save().wait()
                        raise Killed

    data: Any = torch.arange(16.0)
    train(DataLoader(data[:8], 2, shuffle=True), 2)
    kind = "Random" if shuffle else "Sequential"
    now = f"batch_size={batch}, drop_last=False, {samples} samples, {kind}Sampler"
    before = "batch_size=2, drop_last=False, 8 samples, RandomSampler at the save"
    with pytest.raises(ValueError, match=f"{error} has changed: {now}; {before}"):
        train(DataLoader(data[:samples], batch, shuffle=shuffle), 4)


def test_what_a_worker_has_fetched_ahead_does_not_count(tmp_path: Path) -> None:
    """The digest is that of the batches that are done, not of those that were drawn."""
    whole = run(tmp_path / "whole", "torch", in_states=False, workers=0)
    first = run(tmp_path / "resumed", "torch", stop=1, in_states=False, workers=2)
    assert first + run(tmp_path / "resumed", "torch", in_states=False, workers=0) == whole
