"""`ConsistentDDP` in one process: the state of a part, and the sum of the gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from outlast.elastic import ConsistentDDP, ElasticLoader


@dataclasses.dataclass
class Part:
    """Stands in for a loader."""

    part: int
    weight: float
    boundary: bool


def passed(model: ConsistentDDP, parts: list[tuple[torch.Tensor, float]]) -> None:
    """Runs one global batch of these parts."""
    for number, (data, weight) in enumerate(parts):
        with model.part(Part(number, weight, number == len(parts) - 1)):
            model(data).square().mean().backward()


def gradients(module: nn.Module) -> list[torch.Tensor]:
    found = []
    for parameter in module.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad.clone())
    return found


def test_the_gradient_is_that_of_the_global_batch() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    data = torch.randn(11, 5)
    loader = ElasticLoader(
        TensorDataset(data), global_batch_size=11, virtual_replicas=4, shuffle=False
    )
    model = ConsistentDDP(module, 4)
    for _ in range(2):
        for (part,) in loader:
            with model.part(loader):
                model(part).square().mean().backward()
        found = gradients(module)
        module.zero_grad()
        module(data).square().mean().backward()
        for one, other in zip(found, gradients(module), strict=True):
            torch.testing.assert_close(one, other)


def test_gradients_are_summed_in_the_order_of_the_parts() -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    model = ConsistentDDP(module, 3)
    batches = [(torch.randn(4, 3), 0.3), (torch.randn(2, 3), 0.5), (torch.randn(1, 3), 0.2)]
    passed(model, batches)
    found = gradients(module)
    total = [torch.zeros_like(p) for p in module.parameters()]
    for data, weight in batches:
        module.zero_grad()
        module(data).square().mean().backward()
        total = [t + g * weight for t, g in zip(total, gradients(module), strict=True)]
    assert all(torch.equal(one, other) for one, other in zip(found, total, strict=True))


def test_a_part_of_weight_0_has_no_effect() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model = ConsistentDDP(module, 2)
    model.train()
    data = torch.randn(6, 3)
    before = [b.clone() for b in model._buffers_of[0]]
    passed(model, [(torch.full((2, 3), 1e30), 0.0), (data, 1.0)])
    found = gradients(module)
    assert all(map(torch.equal, before, model._buffers_of[0]))
    assert all(bool(g.isfinite().all()) for g in found)
    module.zero_grad()
    module(data).square().mean().backward()
    for one, other in zip(found, gradients(module), strict=True):
        torch.testing.assert_close(one, other)


def test_each_part_has_its_own_random_numbers_and_statistics() -> None:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model = ConsistentDDP(module, 2, seed=9)
    model.train()
    drawn: list[torch.Tensor] = []
    outside = torch.get_rng_state()
    for _ in range(2):
        for number in range(2):
            with model.part(Part(number, 0.5, number == 1)):
                drawn.append(torch.rand(3))
                model(torch.randn(4, 3) + 5 * number).sum().backward()
    assert len({tuple(d.tolist()) for d in drawn}) == 4
    assert torch.equal(torch.get_rng_state(), outside)
    first, second = model._buffers_of[0], model._buffers_of[1]
    assert not torch.equal(first[0], second[0])
    assert int(first[2]) == int(second[2]) == 2
    model.average_statistics()
    torch.testing.assert_close(module[1].running_mean, (first[0] + second[0]) / 2)
    assert int(module[1].num_batches_tracked) == 2


class Buffers(nn.Module):
    """Has buffers of every kind; a forward pass changes one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("turns", torch.tensor([1 + 2j]))
        self.register_buffer("bytes", torch.tensor([250], dtype=torch.uint8))
        self.register_buffer("third", torch.tensor([1 / 3], dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + data.sum()  # a new tensor
        found: torch.Tensor = self.linear(data)
        return found


def test_buffers_of_every_kind() -> None:
    module = Buffers()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    model = ConsistentDDP(module, 7)
    passed(model, [(torch.full((1, 2), float(i)), 1 / 7) for i in range(7)])
    model.average_statistics()
    after = dict(module.named_buffers())
    assert after["seen"].tolist() == [sum(2.0 * i for i in range(7)) / 7]
    for name in ("mask", "turns", "bytes", "third"):
        assert torch.equal(after[name], before[name]), name


def test_the_state_of_the_parts_is_saved_and_loaded() -> None:
    def trained(model: ConsistentDDP, count: int) -> None:
        model.train()
        for _ in range(count):
            passed(model, [(torch.rand(4, 3), 0.5), (torch.rand(4, 3), 0.5)])

    def made() -> ConsistentDDP:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        return ConsistentDDP(module, 2)

    one, other = made(), made()
    torch.manual_seed(1)
    trained(one, 3)
    saved = one.parts_state_dict()
    other.load_parts_state_dict(
        {
            part: {
                "random": {k: v.clone() for k, v in each["random"].items()},
                "buffers": {k: v.clone() for k, v in each["buffers"].items()},
            }
            for part, each in saved.items()
        }
    )
    for model in (one, other):
        torch.manual_seed(2)
        trained(model, 1)
    for a, b in zip(gradients(one.module), gradients(other.module), strict=True):
        assert torch.equal(a, b)
    for part in range(2):
        assert all(map(torch.equal, one._buffers_of[part], other._buffers_of[part]))


def test_an_abandoned_batch_has_no_effect() -> None:
    module = nn.Linear(3, 2)
    model = ConsistentDDP(module, 2)
    data = torch.randn(4, 3)

    def breaks() -> None:
        with model.part(Part(1, 0.5, True)):
            raise RuntimeError("a fault")

    with model.part(Part(0, 0.5, False)):
        model(data * 100).sum().backward()
    with pytest.raises(RuntimeError, match="a fault"):
        breaks()
    passed(model, [(data, 0.5), (data, 0.5)])
    found = gradients(module)
    module.zero_grad()
    module(data).square().mean().backward()
    for one, other in zip(found, gradients(module), strict=True):
        torch.testing.assert_close(one, other)


def test_frozen_and_unused_parameters() -> None:
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
    module[1].requires_grad_(False)
    model = ConsistentDDP(module, 2)
    for number in range(2):
        with model.part(Part(number, 0.5, number == 1)):
            module[1](module[0](torch.ones(1, 2))).sum().backward()
    assert module[1].weight.grad is None
    assert module[2].weight.grad is None, "as autograd leaves it"
    module[1].requires_grad_(True)
    for number in range(2):
        with model.part(Part(number, 0.5, number == 1)):
            module[1](module[0](torch.ones(1, 2))).sum().backward()
    assert module[1].weight.grad is not None


def test_an_optimizer_does_not_change_unused_parameters() -> None:
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model = ConsistentDDP(module, 3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)

    def step(*using: int) -> None:
        for number in range(3):
            with model.part(Part(number, 1 / 3, number == 2)):
                found = module[0](torch.ones(1, 2))
                (module[1](found) if number in using else found).sum().backward()
        optimizer.step()

    step(1)
    before = [p.detach().clone() for p in module.parameters()]
    step()
    assert [p.grad is None for p in module.parameters()] == [False, False, True, True]
    moved = [not torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True)]
    assert moved == [True, True, False, False]
    step(0, 2)
    assert not torch.equal(module[1].weight, before[2])


def test_a_zero_gradient_is_a_gradient() -> None:
    module = nn.Linear(2, 1)
    passed(ConsistentDDP(module, 2), [(torch.zeros(1, 2), 0.5), (torch.zeros(1, 2), 0.5)])
    assert module.weight.grad is not None
    assert not module.weight.grad.any()


def test_invalid_use() -> None:
    model = ConsistentDDP(nn.Linear(1, 1), 2)
    part: Any = Part(2, 0.5, False)
    with pytest.raises(ValueError, match=r"rank 0 has parts \[0, 1\], not part 2"):  # noqa: SIM117
        with model.part(part):
            pass
    with pytest.raises(ValueError, match="virtual_replicas=0 is less than the 1 replicas"):
        ConsistentDDP(nn.Linear(1, 1), 0)
