"""A model is loaded as by torch, whose `load_state_dict` visits all names again for each layer."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import outlast
from outlast.elastic.job import optimizer_part
from outlast.elastic.job.live.frozen import Frozen
from outlast.elastic.job.live.transfer import Exchange
from outlast.elastic.job.optimizer_part import OptimizerPart
from outlast.elastic.wrapped_modules import load_plain


class _Noted(nn.Linear):
    """Notes that torch has called its own way to load."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls: list[str] = []

    def note(self, *_: Any) -> None:
        self.calls.append("called")


class _OwnLoad(_Noted):
    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        self.note()
        return super().load_state_dict(*args, **options)


class _OwnParts(_Noted):
    def _load_from_state_dict(self, *args: Any) -> None:
        self.note()
        super()._load_from_state_dict(*args)


class _Decorated(_Noted):
    @functools.wraps(nn.Module._load_from_state_dict)
    def _load_from_state_dict(self, *args: Any) -> None:
        self.note()
        super()._load_from_state_dict(*args)


class _Extra(_Noted):
    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        self.calls.append(f"called with {state}")


def _hooked(register: str) -> _Noted:
    module = _Noted()
    getattr(module, register)(module.note)
    return module


def _set_load() -> _Noted:
    module = _Noted()
    load = module.load_state_dict
    module.load_state_dict = lambda state: (module.note(), load(state))[1]  # type: ignore[method-assign]
    return module


def _model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2)))
    model.tied = model[0]
    model.register_buffer("kept", torch.ones(2))
    model.register_buffer("not_kept", torch.ones(2), persistent=False)
    return model


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules that torch's function was called for."""
    found: list[nn.Module] = []
    real = nn.Module.load_state_dict

    def load_state_dict(self: nn.Module, *args: Any, **options: Any) -> Any:
        found.append(self)
        return real(self, *args, **options)

    monkeypatch.setattr(nn.Module, "load_state_dict", load_state_dict)
    return found


def test_a_plain_model_is_copied_in_place(loads: list[nn.Module]) -> None:
    model, other = _model(), _model()
    places = [each.data_ptr() for each in model.state_dict().values()]
    counts = [each._version for each in model.parameters()]
    load_plain(model, other.state_dict())
    assert loads == []
    for name, each in model.state_dict().items():
        assert torch.equal(each, other.state_dict()[name]), name
    assert [each.data_ptr() for each in model.state_dict().values()] == places
    assert all(
        each._version > count for each, count in zip(model.parameters(), counts, strict=True)
    )
    assert all(each.grad_fn is None for each in model.parameters())


@pytest.mark.parametrize(
    "make",
    [
        _OwnLoad,
        _OwnParts,
        _Decorated,
        _Extra,
        lambda: _hooked("register_load_state_dict_pre_hook"),
        lambda: _hooked("register_load_state_dict_post_hook"),
        _set_load,
    ],
)
def test_what_loads_in_its_own_way_does_so(make: Callable[[], _Noted]) -> None:
    own = make()
    outer = own if isinstance(own, _OwnLoad) or "load_state_dict" in vars(own) else None
    module = outer or nn.Sequential(nn.Linear(2, 2), own)
    state = {name: copy.deepcopy(each) for name, each in module.state_dict().items()}
    load_plain(module, state)
    assert own.calls


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"0.weight": None}, r"Missing key\(s\) in state_dict: \"0.weight\""),
        ({"3.weight": torch.ones(2)}, r"Unexpected key\(s\) in state_dict: \"3.weight\""),
        ({"0.weight": torch.ones(3, 2)}, "size mismatch for 0.weight"),
        ({"0.weight": 1.0}, "expected torch.Tensor"),
    ],
)
def test_torch_says_what_does_not_fit(changed: dict[str, Any], message: str) -> None:
    model = _model()
    state = {k: v for k, v in {**model.state_dict(), **changed}.items() if v is not None}
    with pytest.raises(RuntimeError, match=message):
        load_plain(model, state)


def test_a_tensor_that_cannot_be_written_to_is_named_by_torch() -> None:
    model = _model()
    with torch.inference_mode():
        model.register_buffer("kept", torch.ones(2))
    with pytest.raises(RuntimeError, match='While copying the parameter named "kept"'):
        load_plain(model, _model().state_dict())


class _Number(int):
    """Notes each comparison: torch looks for the parameter of each tensor among all."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        _Number.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_an_optimizer_finds_its_parameters_without_a_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 100
    model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(count)])
    optimizer = torch.optim.Adam(model.parameters())
    part = OptimizerPart(optimizer, model, is_named=False)
    for each in model.parameters():
        each.grad = torch.ones(1)
    optimizer.step()
    state = part.save()
    state["param_groups"][0]["params"] = [_Number(each) for each in range(count)]
    part.load(state, 1)
    assert _Number.compared < 10 * count
    assert type(optimizer.param_groups[0]["params"]) is list
    monkeypatch.setattr(optimizer_part, "_Numbers", list)
    part.load(state, 1)
    assert _Number.compared > count * count


def test_a_state_that_no_rank_lacks_is_not_pickled() -> None:
    class Unused:
        leaves = ()

        def header(self) -> bytes:
            raise AssertionError("no rank receives it")

    assert Exchange(None, 0).run({}, cast(Frozen, Unused())) is None


class _Observer(nn.Module):
    """Resizes its buffer to what it has seen, and when it is loaded: as torch's observers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.scale = inputs.detach().abs().amax(0)
        result: torch.Tensor = self.layer(inputs)
        return result

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.scale = torch.empty_like(state[f"{prefix}scale"])
        super()._load_from_state_dict(state, prefix, *args)


def test_a_buffer_that_its_module_resizes_is_loaded(tmp_path: Path) -> None:
    seen = torch.tensor([[3.0, -4.0]])
    for number in range(2):
        observer = _Observer()
        model = nn.Sequential(nn.BatchNorm1d(2), observer)
        optimizer = torch.optim.Adam(model.parameters())
        with outlast.Job(tmp_path, model=model, optimizer=optimizer, every=None) as job:
            job.restore()
            if number:
                assert job.restored_from == "storage"
                assert torch.equal(observer.scale, seen.abs()[0])
                return
            observer(seen)
            job.step()
            job.save().wait()
