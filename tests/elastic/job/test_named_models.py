"""Several models and optimizers in one job: their names, and what does not fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import outlast
from outlast.elastic import ConsistentDDP, FiniteCheck
from outlast.elastic.silent_faults.layout import Layout
from outlast.errors import CheckpointMismatch, NonFinite


def linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(2, 2)


def adam(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for model in models for p in model.parameters()], lr=0.1)


def job(path: Path, model: Any, optimizer: Any, **options: Any) -> outlast.Job:
    given: dict[str, Any] = {"every": None, "signals": (), **options}
    return outlast.Job(path, model=model, optimizer=optimizer, **given)


def state_of(job: outlast.Job) -> list[Any]:
    given: Any = job.optimizer
    optimizers = list(given.values()) if isinstance(given, Mapping) else [given]
    states = [each.state_dict()["state"] for each in optimizers]
    moments = [v for state in states for each in state.values() for v in each.values()]
    return [tensor.tolist() for tensor in (*job.module.state_dict().values(), *moments)]


def train(job: outlast.Job, *optimizers: torch.optim.Optimizer) -> None:
    for each in optimizers:
        for group in each.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach().clone()
        each.step()
    job.step()


def names_in(path: Path) -> set[str]:
    """The names in the newest checkpoint."""
    newest = max(path.glob("step-*"))
    found = FileSystemReader(newest).read_metadata().state_dict_metadata
    return {name for name in found if name.startswith(("model", "optimizer"))}


def test_one_model_without_a_name_keeps_its_format(tmp_path: Path) -> None:
    model = linear(0)
    optimizer = adam(model)
    with job(tmp_path, model, optimizer) as one:
        one.restore()
        train(one, optimizer)
    names = {name for name in names_in(tmp_path) if ".param_groups." not in name}
    moments = {f"optimizer.state.{n}.{m}" for n in "01" for m in ("step", "exp_avg", "exp_avg_sq")}
    assert names == {"model.weight", "model.bias", *moments}


def gan(seed: int) -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
    g, d, teacher = linear(seed), linear(seed + 1), linear(seed + 2).requires_grad_(False)
    return {"g": g, "d": d, "teacher": teacher}, {"g": adam(g), "d": adam(d)}


def one_optimizer(seed: int) -> tuple[Any, Any]:
    models = {"encoder": linear(seed), "decoder": linear(seed + 1)}
    return models, adam(*models.values())


def two_optimizers(seed: int) -> tuple[Any, Any]:
    model = linear(seed)
    matrices = torch.optim.SGD([model.weight], lr=0.1, momentum=0.9)
    return model, {"matrices": matrices, "rest": torch.optim.Adam([model.bias])}


def only(seed: int) -> tuple[Any, Any]:
    model = linear(seed)
    return {"only": model}, {"only": adam(model)}


def shared(seed: int) -> tuple[Any, Any]:
    """Both optimizers have the bias."""
    models = {"a": linear(seed), "b": linear(seed + 1)}
    models["b"].bias = models["a"].bias
    return models, {name: adam(model) for name, model in models.items()}


@pytest.mark.slow
@pytest.mark.parametrize("made", [gan, one_optimizer, two_optimizers, only, shared])
def test_a_job_is_loaded_as_it_was_saved(
    tmp_path: Path, made: Callable[[int], tuple[Any, Any]]
) -> None:
    model, optimizer = made(0)
    optimizers = optimizer.values() if isinstance(optimizer, dict) else [optimizer]
    with job(tmp_path, model, optimizer) as one:
        one.restore()
        for _ in range(3):
            train(one, *optimizers)
        state = state_of(one)
    with job(tmp_path, *made(7)) as again:
        assert again.restore() == 3
        assert state_of(again) == state


def test_each_model_has_its_name_in_a_checkpoint(tmp_path: Path) -> None:
    models, optimizers = gan(0)
    with job(tmp_path, models, optimizers) as one:
        assert isinstance(one.module, nn.ModuleDict)
        assert one.module["g"] is models["g"]
        one.restore()
        train(one, *optimizers.values())
    names = names_in(tmp_path)
    assert {f"model.{name}.{p}" for name in models for p in ("weight", "bias")} <= names
    assert {f"optimizer.{name}.state.0.exp_avg" for name in "gd"} <= names
    assert not any(name.startswith("optimizer.teacher") for name in names)


def test_names_that_differ_from_those_saved_are_named(tmp_path: Path) -> None:
    with job(tmp_path, *gan(0)) as one:
        one.restore()
    models, optimizers = gan(0)
    models["student"] = models.pop("g")
    optimizers["student"] = optimizers.pop("g")
    with (
        pytest.raises(CheckpointMismatch, match=r"only in the state dict: model\.student\.bias"),
        job(tmp_path, models, optimizers) as other,
    ):
        other.restore()


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("sharded", [False, True])
def test_an_optimizer_that_has_made_no_step_yet_has_no_moments(
    tmp_path: Path, sharded: bool
) -> None:
    """Neither after a restore: torch creates those of sharded parameters with a step."""

    def made(seed: int) -> tuple[Any, Any]:
        models = {"g": linear(seed), "d": linear(seed + 1)}
        if sharded:
            mesh = init_device_mesh("cpu", (1,))
            models = {name: fully_shard(model, mesh=mesh) for name, model in models.items()}
        return models, {name: adam(model) for name, model in models.items()}

    model, optimizer = made(0)
    with job(tmp_path, model, optimizer) as one:
        one.restore()
        train(one, optimizer["d"])
    model, optimizer = made(2)
    with job(tmp_path, model, optimizer) as again:
        assert again.restore() == 1
        assert not optimizer["g"].state
        assert [int(each["step"]) for each in optimizer["d"].state.values()] == [1, 1]
        train(again, *optimizer.values())
        assert again.restore(1) == 1  # of an optimizer that has moments now
        assert not optimizer["g"].state


@pytest.mark.usefixtures("_group")
def test_a_model_is_saved_without_its_wrapper(tmp_path: Path) -> None:
    models, optimizers = gan(0)
    wrapped = {**models, "g": DistributedDataParallel(models["g"])}
    with job(tmp_path, wrapped, optimizers) as one:
        one.restore()
    models, optimizers = gan(3)
    compiled = torch.compile(models["d"], backend="eager")
    with job(tmp_path, {**models, "d": compiled}, optimizers) as other:
        assert other.restore() == 0
        assert state_of(other) == state_of(one)


def test_checks_name_a_tensor_with_its_model(tmp_path: Path) -> None:
    models, optimizers = gan(0)
    with (
        pytest.raises(NonFinite, match=r"values of d\.weight .*not finite"),
        job(tmp_path, models, optimizers, checks=FiniteCheck(every=1)) as one,
    ):
        one.restore()
        assert Layout.of(one.module, 1).labels[:3] == ["g.weight", "g.bias", "d.weight"]
        with torch.no_grad():
            models["d"].weight[0, 0] = float("nan")
        one.step()


def wrong(models: Any = None, optimizers: Any = None) -> tuple[Any, Any]:
    given = gan(0)
    return {**given[0], **(models or {})}, {**given[1], **(optimizers or {})}


def swapped() -> tuple[Any, Any]:
    models, optimizers = gan(0)
    return models, {"g": optimizers["d"], "d": optimizers["g"]}


def without_d() -> tuple[Any, Any]:
    models, optimizers = gan(0)
    return {"g": models["g"]}, optimizers


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            swapped,
            ValueError,
            r"optimizer\['g'\] has no parameter of model\['g'\], but those of 'd'",
        ),
        (
            without_d,
            ValueError,
            r"optimizer\['d'\] has a parameter of shape \(2, 2\) that is in no",
        ),
        (lambda: ({}, adam(linear(0))), ValueError, "model has no entries"),
        (lambda: (linear(0), {}), ValueError, "optimizer has no entries"),
        (lambda: wrong({"a.b": linear(0)}), ValueError, r"'a\.b' cannot be a name in model"),
        (lambda: wrong({"": linear(0)}), ValueError, "'' cannot be a name in model"),
        (lambda: wrong({"train": linear(0)}), ValueError, "'train' cannot be a name in model"),
        (lambda: wrong({"training": linear(0)}), ValueError, "'training' cannot be a name in mod"),
        (lambda: wrong({1: linear(0)}), TypeError, "names in model must be texts, not 1"),
        (lambda: wrong({"a": 1}), TypeError, r"model\['a'\] must be a module, not 1"),
        (lambda: wrong({}, {"a": 1}), TypeError, r"optimizer\['a'\] must be an optimizer, not 1"),
        (lambda: wrong({"a": ConsistentDDP(linear(0), 1)}), ValueError, r"model\['a'\] is a Consi"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, given: Callable[[], tuple[Any, Any]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        job(tmp_path, *given())


def test_a_parameter_of_an_optimizer_may_be_in_states(tmp_path: Path) -> None:
    models, optimizers = gan(0)
    loss = linear(5)
    optimizers["loss"] = adam(loss)
    with job(tmp_path, models, optimizers, states={"loss": loss}) as one:
        assert one.restore() == 0
