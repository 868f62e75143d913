"""States of optimizers that torch's own do not have: all that was saved is there, and no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import outlast


class Own(Optimizer):
    """SGD whose state `keep` makes at each step."""

    def __init__(
        self, parameters: Any, keep: Callable[[dict[str, Any], torch.Tensor], None]
    ) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.keep = keep

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self.keep(self.state[each], each)
                    each.add_(each.grad, alpha=-group["lr"])


class OwnLoad(Own):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)


def master(state: dict[str, Any], parameter: torch.Tensor) -> None:
    """A sum of 32 bits of the gradients of a parameter of 16 bits, and a count."""
    state.setdefault("sum", torch.zeros(parameter.shape)).add_(parameter.grad.float() / 3)
    state.setdefault("count", torch.zeros((), dtype=torch.int64)).add_(1)


def history(state: dict[str, Any], parameter: torch.Tensor) -> None:
    """A list that grows, and an entry that comes in the third step."""
    state.setdefault("past", []).append(parameter.clone())
    if len(state["past"]) > 2:
        state["late"] = torch.ones(1)


def job(path: Path, model: nn.Module, optimizer: Optimizer) -> outlast.Job:
    return outlast.Job(path, model=model, optimizer=optimizer, every=None, signals=(), linger=0)


def train(job: outlast.Job, steps: int) -> None:
    for _ in range(steps):
        job.optimizer.zero_grad()
        job.module(torch.ones(2, 3, dtype=next(job.module.parameters()).dtype)).sum().backward()
        job.optimizer.step()
        job.step()


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.double().tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items() if key != "param_groups"}
    return [plain(each) for each in value] if isinstance(value, list) else value


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def test_moments_of_other_types_than_the_parameter(tmp_path: Path, model: nn.Linear) -> None:
    model.to(torch.bfloat16)
    with job(tmp_path, model, Own(model.parameters(), master)) as first:
        first.restore()
        train(first, 3)
        saved = plain(first.optimizer.state_dict())
    with job(tmp_path, model, Own(model.parameters(), master)) as second:
        assert second.restore() == 3
        assert plain(second.optimizer.state_dict()) == saved
    assert saved["state"][0]["sum"][0] == "torch.float32"


@pytest.mark.parametrize("kind", [Own, OwnLoad, torch.optim.LBFGS])
def test_a_kept_optimizer_has_nothing_of_later_steps(
    tmp_path: Path, model: nn.Linear, kind: type[Own]
) -> None:
    optimizer: Any = kind(model.parameters(), *([history] if issubclass(kind, Own) else []))

    def steps(job: outlast.Job, count: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss

        for _ in range(count):
            loss = closure()
            optimizer.step(closure) if kind is torch.optim.LBFGS else optimizer.step()
            job.step(loss=loss)

    with job(tmp_path, model, optimizer) as first:
        first.restore()
        steps(first, 2)
        saved = plain(optimizer.state_dict())
        first.save().result()
        steps(first, 3)
    with job(tmp_path, model, optimizer) as second:
        assert second.restore(step=2) == 2
        assert plain(optimizer.state_dict()) == saved


@pytest.mark.parametrize("kind", [Own, OwnLoad])
def test_what_a_constructor_makes_is_there_in_the_first_step(
    tmp_path: Path, model: nn.Linear, kind: type[Own]
) -> None:
    def made() -> Own:
        def keep(state: dict[str, Any], parameter: torch.Tensor) -> None:
            state["last"] = parameter + state["anchor"]

        optimizer = kind(model.parameters(), keep)
        for each in model.parameters():
            optimizer.state[each]["anchor"] = each.detach().clone()
        return optimizer

    with job(tmp_path, model, made()) as first:
        first.restore()
        train(first, 2)
        saved = plain(first.optimizer.state_dict())
    nn.init.zeros_(model.weight)
    with job(tmp_path, model, made()) as second:
        assert second.restore() == 2
        assert plain(second.optimizer.state_dict()) == saved


def test_sparse_gradients(tmp_path: Path) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    with job(tmp_path, embedding, optimizer) as trained:
        trained.restore()
        for _ in range(2):
            optimizer.zero_grad()
            embedding(torch.tensor([1, 3])).sum().backward()
            optimizer.step()
            trained.step()


def test_tensors_can_be_resized_after_a_restore(tmp_path: Path, model: nn.Linear) -> None:
    model.register_buffer("seen", torch.zeros(0))
    model.empty = nn.Parameter(torch.ones(4)[4:])  # as the shard of a rank that has none
    with job(tmp_path, model, torch.optim.SGD(model.parameters())) as trained:
        trained.restore()
        for each in (*model.parameters(), *model.buffers()):
            assert each.untyped_storage().resizable()
        model.seen.resize_(4).fill_(1)
        train(trained, 2)


def test_a_lazy_module_is_named(tmp_path: Path) -> None:
    lazy = nn.Sequential(nn.LazyLinear(2))
    with (
        pytest.raises(ValueError, match=r"'0\.weight' is uninitialized: call the model once"),
        job(tmp_path, lazy, torch.optim.SGD(lazy.parameters())) as trained,
    ):
        trained.restore()
