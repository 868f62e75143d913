"""Tensors of a job that wrap others come back in the objects that make them, or an error says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outlast
from outlast.errors import CheckpointError
from scaled_tensors import Momentum8, Scaled


class Model(nn.Module):
    """A trained layer on a frozen one with quantized weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Parameter(Scaled.of(torch.randn(8, 8)), requires_grad=False)
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(x @ self.base)
        return y


class Training:
    """A model with two optimizers, of which one is attached to the job as a state."""

    def __init__(self, path: Path, seed: int, optimizer: Any = Momentum8) -> None:
        self.model = Model(seed)
        self.optimizer = optimizer([self.model.head.weight], lr=0.1)
        self.second = Momentum8([self.model.head.bias], lr=0.1)
        self.job = outlast.Job(
            path,
            model=self.model,
            optimizer=self.optimizer,
            states={"second": self.second},
            every=None,
            signals=(),
        )

    def steps(self, until: int) -> None:
        while self.job.steps < until:
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(self.job.steps))
            self.model(x).square().sum().backward()
            for each in (self.optimizer, self.second):
                each.step()
                each.zero_grad()
            self.job.step()

    def contents(self) -> list[Any]:
        moments = [
            each["momentum"] for o in (self.optimizer, self.second) for each in o.state.values()
        ]
        wrapped: list[Any] = [self.model.base, *moments]
        assert all(type(each) is Scaled for each in wrapped)
        plain = [t.tolist() for each in wrapped for t in (each.content, each.scale)]
        return [plain, *(each.tolist() for each in self.model.head.parameters())]


def test_another_process_has_them_as_they_were(tmp_path: Path) -> None:
    whole = Training(tmp_path / "whole", 0)
    with whole.job:
        whole.job.restore()
        whole.steps(6)
    first = Training(tmp_path / "c", 0)
    with first.job:
        first.job.restore()
        first.steps(3)
    second = Training(tmp_path / "c", 1)
    with second.job:
        assert second.job.restore() == 3
        assert second.contents() == first.contents()
        second.steps(6)
    assert second.contents() == whole.contents()


def test_a_job_with_moments_goes_back(tmp_path: Path) -> None:
    training = Training(tmp_path, 0)
    with training.job:
        training.job.restore()
        training.steps(3)
        training.job.save().result()
        contents = training.contents()
        training.steps(5)
        training.job.restore(step=3)
        assert training.contents() == contents


def test_another_optimizer_is_refused_and_nothing_has_changed(tmp_path: Path) -> None:
    first = Training(tmp_path, 0)
    with first.job:
        first.job.restore()
        first.steps(3)
    other = Training(tmp_path, 1, torch.optim.Adam)
    before = other.contents()
    with (
        other.job,
        pytest.raises(
            CheckpointError, match=r"'optimizer\.state\.0\.momentum' was saved as Scaled"
        ),
    ):
        other.job.restore()
    assert other.contents() == before


def test_a_mismatch_says_what_a_job_can_do(tmp_path: Path) -> None:
    with Training(tmp_path, 0).job as job:
        job.restore()
        job.step()
    other = Training(tmp_path, 0)
    other.model.extra = nn.Parameter(torch.ones(1))
    with other.job, pytest.raises(CheckpointError, match="For a Job: restore the model with a"):
        other.job.restore()
    model = other.model.state_dict()
    with outlast.Checkpointer(tmp_path, linger=0) as checkpointer:  # as it says
        assert checkpointer.restore({"model": model}, strict=False) == 1
