"""Each of the elements that are compared tells a write that torch does not count, of any type."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
