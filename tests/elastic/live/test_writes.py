"""Each of the elements that are compared tells a write that torch does not count, of any type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from outlast.elastic.job.live import writes as module
from outlast.elastic.job.live.writes import Writes

KINDS = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128]


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    found = [nn.Parameter(torch.randn(37, dtype=kind)) for kind in KINDS]
    turned = nn.Parameter(torch.randn(6, 8).t())  # its memory is not in the order of its elements
    return [*found, turned, nn.Parameter(torch.randn(())), nn.Parameter(torch.empty(0))]


def test_a_write_to_any_compared_element_is_found() -> None:
    model = parameters()
    writes = Writes(model, [])
    marks = writes.marks()
    assert not writes.since(marks)
    for each in model:
        memory = each.data.t() if each.ndim == 2 else each.data
        flat = memory.reshape(-1)  # a view: in the order of the memory
        compared = range(0, each.numel(), max(1, each.numel() // 16))[:16]
        for number in compared:
            before = flat[number].clone()
            for change in (1, 1j) if each.is_complex() else (1,):
                flat[number] += change
                assert writes.since(marks), f"element {number} of {each.dtype}, {tuple(each.shape)}"
                flat[number] = before
    assert not writes.since(marks)


@pytest.mark.parametrize("key", ["exp_avg", "step"])
def test_an_optimizers_tensor_that_is_replaced_by_an_equal_one_is_found(key: str) -> None:
    model = [nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))]
    optimizer = torch.optim.Adam(model)
    sum(each.square().sum() for each in model).backward()
    optimizer.step()
    writes = Writes(model, [optimizer])
    marks = writes.marks()
    state = optimizer.state[model[1]]
    other = state[key].clone()
    while other._version < state[key]._version:
        other.add_(0)
    assert not writes.counted_since(marks)
    state[key] = other
    assert writes.counted_since(marks)
    assert writes.since(marks)


def trained() -> tuple[list[nn.Parameter], torch.optim.Optimizer, Writes]:
    """Large enough for elements that are not compared; noted as after two steps."""
    torch.manual_seed(0)
    model = [nn.Parameter(torch.randn(64)) for _ in range(3)]
    optimizer = torch.optim.Adam(model)
    writes = Writes(model, [optimizer])
    for _ in range(2):
        sum(each.square().sum() for each in model).backward()
        optimizer.step()
        optimizer.zero_grad()
        writes.marks()
    return model, optimizer, writes


@pytest.mark.parametrize("key", ["parameter", "exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize("number", range(3))
def test_a_write_to_one_element_of_any_tensor_is_found(key: str, number: int) -> None:
    model, optimizer, writes = trained()
    marks = writes.marks()
    assert not writes.since(marks)
    state = {**optimizer.state[model[number]], "parameter": model[number].data}
    if key == "parameter":
        with torch.no_grad():
            model[number][3:4].add_(1)  # not one of the elements that are compared
    else:
        state[key].view(-1)[-1:].add_(1)
    assert writes.counted_since(marks)
    assert writes.since(marks)


def test_parameters_in_other_memory_with_the_same_values_are_found() -> None:
    """Whose writes torch does not count: also if the first memory is there again afterwards."""
    model, _, writes = trained()
    for each in model:
        before, marks = each.data, writes.marks()
        each.data = before.clone()
        assert writes.since(marks)
        swapped = writes.marks()
        assert not writes.since(swapped)
        each.data = before
        assert writes.since(swapped)
        assert not writes.since(marks)


@pytest.mark.parametrize("value", [1, 2.0, None, "inference"])
def test_an_optimizers_tensor_that_is_replaced_by_another_value_is_found(value: object) -> None:
    """And later writes to the other ones, which are then read in another way."""
    model, optimizer, writes = trained()
    marks = writes.marks()
    if value == "inference":
        with torch.inference_mode():
            value = torch.ones(())
    optimizer.state[model[1]]["step"] = value
    assert writes.counted_since(marks)
    assert writes.since(marks)
    for key, number in (("exp_avg", 0), ("exp_avg_sq", 2)):
        marks = writes.marks()
        assert not writes.since(marks)
        optimizer.state[model[number]][key].add_(1)
        assert writes.since(marks)
    marks = writes.marks()
    del optimizer.state[model[2]]["step"]
    assert writes.since(marks)


def test_a_write_is_found_beside_a_parameter_whose_writes_torch_does_not_count() -> None:
    model, _, _ = trained()
    with torch.inference_mode():
        model.insert(1, nn.Parameter(torch.randn(4), requires_grad=False))
    writes = Writes(model, [])
    for number in (0, 2, 3):
        marks = writes.marks()
        assert not writes.since(marks)
        with torch.no_grad():
            model[number][3:4].add_(1)
        assert writes.counted_since(marks)
        assert writes.since(marks)
    model[3].grad = torch.ones(64)
    writes.marks()
    assert [*map(id, writes.with_gradient)] == [id(model[3])]


def test_the_parameters_with_a_gradient_are_those_of_the_last_look() -> None:
    model, _, writes = trained()
    for number in (0, 2):
        model[number].grad = torch.ones(64)
    writes.marks()
    assert [*map(id, writes.with_gradient)] == [id(model[0]), id(model[2])]
    model[0].grad = None
    writes.marks()
    assert [*map(id, writes.with_gradient)] == [id(model[2])]


def test_a_replaced_tensor_is_found_after_a_restart_has_interrupted_a_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer, writes = trained()
    marks = writes.marks()
    state = optimizer.state[model[1]]
    other = state["exp_avg"].clone()
    while other._version < state["exp_avg"]._version:
        other.add_(0)
    state["exp_avg"] = other

    def interrupted(_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_Moments", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writes.marks()
    assert writes.counted_since(marks)
    assert writes.since(marks)


def test_no_memory_is_read_that_an_interrupted_look_has_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _, writes = trained()
    marks, own, looks = writes.marks(), model[0].data, []
    real = module._samples

    def samples(views: Any) -> Any:
        looks.append(list(views))
        if len(looks) > 1:
            return real(looks[-1])
        writes._samples = real(looks[-1])  # of what is swapped in; then comes the interrupt
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_samples", samples)
    model[0].data = torch.zeros_like(own)  # swapped in for an evaluation
    with pytest.raises(KeyboardInterrupt):
        writes.marks()
    model[0].data = own
    assert not writes.since(marks)
    assert len(looks) == 2
