"""`overlap`: the same values for `Job` and `Checkpointer`, and optimizers inside wrappers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import outlast

Load = Callable[[dict[str, Any]], None]


class AsAccelerate(Optimizer):
    """Shaped like accelerate's `AcceleratedOptimizer`: an optimizer by class, never constructed as
    one, that forwards to the one inside.
    """

    def __init__(self, optimizer: Optimizer) -> None:  # without that of torch
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class Unrelated:
    """Steps by its own code, which calls no hook."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.state: dict[Any, Any] = {}
        self.param_groups = [{"params": parameters, "lr": 0.1}]

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": [{"params": [0], "lr": 0.1}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:  # type: ignore[attr-defined]
                parameter.add_(1)


def accelerated(parameters: list[nn.Parameter]) -> Optimizer:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)
    wrapped: Optimizer = accelerator.prepare_optimizer(torch.optim.Adam(parameters))
    return wrapped


KINDS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "plain": torch.optim.Adam,
    "as accelerate": lambda parameters: AsAccelerate(torch.optim.Adam(parameters)),
    "in two wrappers": lambda parameters: AsAccelerate(AsAccelerate(torch.optim.Adam(parameters))),
    "accelerate": accelerated,
    "unrelated": Unrelated,
}


def train(path: Path, kind: str, steps: int, **options: Any) -> tuple[list[Any], int]:
    """Trains with a save after every step; returns the parameters and the step it began with."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)  # large enough for a copy of its own
    optimizer = KINDS[kind](list(model.parameters()))
    with outlast.Job(
        path, model=model, optimizer=optimizer, every=1, signals=(), keep=2, **options
    ) as job:
        begun = job.restore()
        for _ in range(steps):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            model.zero_grad()
            job.step()
    return [p.tolist() for p in model.parameters()], begun


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapped_optimizer_saves_and_resumes(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = train(tmp_path / "reference", kind, 6)
    train(tmp_path / "resumed", kind, 3)
    caplog.clear()
    found, begun = train(tmp_path / "resumed", kind, 3)
    assert begun == 3
    assert found == expected
    said = "overlap: the step of Unrelated cannot wait for a copy"
    assert sum(said in message for message in caplog.messages) == (kind == "unrelated")


@pytest.mark.parametrize("overlap", ["optimizer", "list", True, False])
def test_the_same_values_for_a_job_and_a_checkpointer(tmp_path: Path, overlap: Any) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    value = {"optimizer": optimizer, "list": [optimizer]}.get(overlap, overlap)
    train(tmp_path / "job", "plain", 2, overlap=value)
    if overlap is True:
        with pytest.raises(ValueError, match=r"overlap=True is for a Job.*overlap=optimizer"):
            outlast.Checkpointer(tmp_path / "checkpointer", overlap=True)
    else:
        outlast.Checkpointer(tmp_path / "checkpointer", overlap=value).close()


@pytest.mark.parametrize("wrong", ["adam", 3, None, [nn.Linear(1, 1)]])
def test_something_else_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^overlap must be an optimizer, several, or False, not"):
        outlast.Checkpointer(tmp_path, overlap=wrong)
    with pytest.raises(TypeError, match=r"^overlap must be an optimizer, several, or False, not"):
        train(tmp_path, "plain", 1, overlap=wrong)


def test_a_scheduler_that_is_made_after_the_restore(tmp_path: Path) -> None:
    """It adds the rate that it begins with to the optimizer's groups, and needs it again there."""
    rates = []
    for until in (2, 4):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with outlast.Job(tmp_path, model=model, optimizer=optimizer, signals=()) as job:
            job.restore()
            scheduler = LambdaLR(optimizer, lambda n: 0.5**n, last_epoch=job.steps - 1)
            while job.steps < until:
                optimizer.step()
                scheduler.step()
                job.step()
                rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.05, 0.025, 0.0125, 0.00625]


def test_a_group_keeps_a_value_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    for more in ({}, {"trust": 1.0}):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD([{"params": model.parameters(), **more}], lr=0.1)
        with outlast.Job(tmp_path, model=model, optimizer=optimizer, signals=()) as job:
            if not more:
                job.restore()
                optimizer.param_groups[0]["lr"] = 0.05
                job.step()
                continue
            assert job.restore() == 1
            group = optimizer.param_groups[0]
            assert (group["lr"], group["trust"]) == (0.05, 1.0)


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Shaped like torch's, which needs a process group."""

    def consolidate_state_dict(self, to: int = 0) -> None: ...


def test_an_optimizer_of_which_a_rank_has_a_part_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = ZeroRedundancyOptimizer(model.parameters())
    for given, name in ((optimizer, "optimizer"), ({"a": optimizer}, r"optimizer\['a'\]")):
        with pytest.raises(ValueError, match=rf"^{name} is a ZeroRedundancyOptimizer, of whose"):
            outlast.Job(tmp_path, model=model, optimizer=given)
