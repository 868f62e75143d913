"""A checkpoint fits a model whether or not it is compiled or wrapped in DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import outlast
from outlast.elastic import ConsistentDDP
from outlast.elastic.wrapped_modules import unwrapped
from outlast.errors import CheckpointMismatch


def module(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def partly(module: nn.Sequential) -> nn.Module:
    module[0] = compiled(module[0])
    return module


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "plain": lambda module: module,
    "compiled": compiled,
    "partly compiled": partly,
    "DDP": DistributedDataParallel,
    "compiled in DDP": lambda module: DistributedDataParallel(compiled(module)),
    "DDP in compiled": lambda module: compiled(DistributedDataParallel(module)),
    "ConsistentDDP in compiled": lambda module: compiled(ConsistentDDP(module, 1)),
}


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    """A process group of one rank, which DDP needs, without gloo's threads."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def job(path: Path, model: nn.Module, **states: Any) -> outlast.Job:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"every": None, "signals": (), "states": states}
    return outlast.Job(path, model=model, optimizer=optimizer, **options)


def train(job: outlast.Job) -> None:
    job.module(torch.ones(4, 2)).square().sum().backward()
    job.optimizer.step()
    job.step()


def state_of(job: outlast.Job) -> list[Any]:
    moments = [value for each in job.optimizer.state.values() for value in each.values()]
    tensors = [*job.model.parameters(), *job.model.buffers(), *moments]
    return [tensor.tolist() for tensor in tensors]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "saved",
    [
        pytest.param(kind, marks=() if kind in ("compiled", "DDP in compiled") else SLOW)
        for kind in WRAPPERS
    ],
)
def test_saved_with_one_wrapper_and_loaded_with_others(tmp_path: Path, saved: str) -> None:
    with job(tmp_path, WRAPPERS[saved](module(0)), other=WRAPPERS[saved](module(1))) as one:
        one.restore()
        train(one)
        one.save().wait()  # averages the statistics of the parts
        state = state_of(one)
        other = [p.tolist() for p in one.states["other"].parameters()]
    kinds = list(WRAPPERS)
    for kind in ("plain", kinds[kinds.index(saved) - 1], saved):
        with job(tmp_path, WRAPPERS[kind](module(2)), other=WRAPPERS[kind](module(3))) as again:
            assert again.restore() == 1
            assert state_of(again) == state
            assert [p.tolist() for p in again.states["other"].parameters()] == other
            assert type(again.module) is nn.Sequential


def test_the_saved_names_are_those_of_the_module(tmp_path: Path) -> None:
    model = compiled(DistributedDataParallel(compiled(partly(module(0)))))
    assert type(unwrapped(model)) is nn.Sequential
    with job(tmp_path, model) as one:
        one.restore()
    names = set(module(0).state_dict())
    with outlast.Checkpointer(tmp_path) as checkpointer:
        state: dict[str, Any] = {"model": {}}
        assert checkpointer.restore(state, strict=False) == 0
    assert set(state["model"]) == names


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    with job(tmp_path, module(0)) as one:
        one.restore()
    for other, message in (
        (nn.Sequential(nn.Linear(2, 5)), r"'model\.0\.bias' has shape \(5,\), \(3,\) was saved"),
        (nn.Linear(2, 3), r"only in the state dict: model\.bias, model\.weight"),
    ):
        with job(tmp_path, other) as refused:
            before = state_of(refused)
            with pytest.raises(CheckpointMismatch, match=message):
                refused.restore()
            assert state_of(refused) == before
            assert not refused.optimizer.state
