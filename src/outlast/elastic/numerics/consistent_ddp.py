"""Bit-identical training at any number of replicas.

    model = ConsistentDDP(module, virtual_replicas=8)
    loader = ElasticLoader(dataset, global_batch_size=96, virtual_replicas=8)
    for images, labels in loader:
        with model.part(loader):
            loss_fn(model(images), labels).backward()
        if loader.boundary:
            optimizer.step()
            optimizer.zero_grad()

The global batch is always split into `virtual_replicas` parts, each with its own random numbers and
batch-norm statistics, and the gradients of the parts are summed in the order of the parts,
((g0 + g1) + g2) + ..., regardless of which replicas computed them. Each replica has consecutive
parts: it adds them to the sum that it receives, and the last one broadcasts the result. A parameter
that only some parts use gets the sum of their gradients; the `grad` of one that no part of any
replica uses is `None`. (The idea is known as accuracy-consistent elasticity: EasyScale, SC'23.)

Requirements: the same kind of processor, the same number of torch threads, and deterministic
operations (on accelerators: `torch.use_deterministic_algorithms`). docs/elastic.md has the costs.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from outlast.coordination.collectives import global_rank
from outlast.elastic.data.loader import ElasticLoader
from outlast.elastic.data.sampler import bounds
from outlast.elastic.numerics.ordered_sum import OrderedSum, views_of
from outlast.elastic.random_generators import mix64
from outlast.system import devices
from outlast.system.arguments import as_int


class ConsistentDDP(nn.Module):
    """Wraps a module so that its gradients are bit-identical at any number of replicas.

    Rank 0 broadcasts its parameters and buffers at construction.

    Args:
        virtual_replicas: the number of parts of every global batch, and the maximum number of
            replicas.
        group: the process group of the replicas; the default one, or this process alone.
        seed: the seed of the parts' random numbers.
    """

    def __init__(
        self, module: nn.Module, virtual_replicas: int, *, group: Any = None, seed: int = 0
    ) -> None:
        super().__init__()
        virtual_replicas = as_int("virtual_replicas", virtual_replicas)
        if dist.is_available() and dist.is_initialized():
            self._rank, self._replicas = dist.get_rank(group), dist.get_world_size(group)
        else:
            self._rank, self._replicas = 0, 1
        if not self._replicas <= virtual_replicas:
            raise ValueError(
                f"virtual_replicas={virtual_replicas} is less than the {self._replicas} replicas"
            )
        self.module, self.virtual_replicas, self._group = module, virtual_replicas, group
        self.parts = range(*bounds(virtual_replicas, self._rank, self._replicas))
        if self._replicas > 1:
            with torch.no_grad():
                for tensor in (*module.parameters(), *module.buffers()):
                    dist.broadcast(tensor, global_rank(group, 0), group=group)
        self._buffers_of = {part: self._copied_buffers() for part in self.parts}
        self._random_of = {part: _seeded(seed, part) for part in self.parts}
        self._sum = OrderedSum(self._rank, self._replicas, group)
        self._before_exchange: dict[int, Callable[[], object]] = OrderedDict()

    def register_before_exchange(self, hook: Callable[[], object]) -> RemovableHandle:
        """Before this rank sends the gradients of a global batch, `hook` is called: its parts have
        drawn their random numbers. The handle removes it.
        """
        handle = RemovableHandle(self._before_exchange)
        self._before_exchange[handle.id] = hook
        return handle

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of the module."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def part(self, loader: ElasticLoader) -> Iterator[None]:
        """Context for the forward and backward pass of one part. After the last part of a global
        batch, the parameters' `grad` is the gradient of the global batch.

        Args:
            loader: the loader that has just yielded the part.

        Raises:
            ValueError: if the part belongs to another replica.
        """
        part = loader.part
        if part not in self.parts:
            raise ValueError(
                f"rank {self._rank} has parts {list(self.parts)}, not part {part}: does the "
                f"loader have virtual_replicas={self.virtual_replicas}?"
            )
        parameters = list(self.module.parameters())
        for parameter in parameters:
            parameter.grad = None
        if part == self.parts.start:
            self._sum.begin([p for p in parameters if p.requires_grad])
        outside = _random_state()
        with torch.no_grad():
            for buffer, value in zip(self.module.buffers(), self._buffers_of[part], strict=True):
                buffer.copy_(value)
        _set_random_state(self._random_of[part])
        try:
            yield
        finally:
            self._random_of[part] = _random_state()
            _set_random_state(outside)
        if loader.weight > 0:
            self._buffers_of[part] = self._copied_buffers()
            self._sum.add(loader.weight)
        for parameter in parameters:
            parameter.grad = None
        if loader.boundary:
            for hook in self._before_exchange.values():
                hook()
            self._sum.finish()

    def average_statistics(self) -> None:
        """Sets the module's buffers (batch-norm statistics) to the mean over the parts, for
        evaluation and saving; bit-identical on all replicas. A collective, if there are several.
        Values that are equal on all parts are unchanged; buffers that are not floating-point are
        taken from the first part.
        """
        own = list(self.module.buffers())
        kinds = {(b.dtype, b.device) for b in own}
        for dtype, device in sorted(kinds, key=str):
            alike = [i for i, b in enumerate(own) if (b.dtype, b.device) == (dtype, device)]
            first = self._flat_of(0, alike)
            if dtype.is_floating_point:
                total = first.double()
                same = torch.ones_like(first, dtype=torch.bool)
                for part in range(1, self.virtual_replicas):
                    other = self._flat_of(part, alike)
                    same &= other == first
                    total += other
                first = torch.where(same, first, (total / self.virtual_replicas).to(dtype))
            with torch.no_grad():
                for i, mean in zip(alike, views_of(first, [own[i] for i in alike]), strict=True):
                    own[i].copy_(mean)

    def parts_state_dict(self) -> dict[str, Any]:
        """The buffers and random state of this replica's parts, by part number. A `Checkpointer`
        saves keys that exist on only one rank; any replica can then load them.
        """
        return {
            str(part): {
                "random": dict(self._random_of[part]),
                "buffers": {str(i): b for i, b in enumerate(self._buffers_of[part])},
            }
            for part in self.parts
        }

    def load_parts_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the result of `parts_state_dict`."""
        for part in self.parts:
            saved = state[str(part)]
            self._random_of[part] = {k: v.cpu() for k, v in saved["random"].items()}
            for i, buffer in enumerate(self._buffers_of[part]):
                buffer.copy_(saved["buffers"][str(i)])

    def _copied_buffers(self) -> list[torch.Tensor]:
        return [buffer.detach().clone() for buffer in self.module.buffers()]

    def _flat_of(self, part: int, numbers: list[int]) -> torch.Tensor:
        """Some of a part's buffers, concatenated; broadcast from the part's owner."""
        buffers = self._buffers_of.get(part)
        if buffers is None:
            own = list(self.module.buffers())
            flat = torch.cat([torch.empty_like(own[i]).flatten() for i in numbers])
        else:
            flat = torch.cat([buffers[i].flatten() for i in numbers])
        if self._replicas > 1:
            replicas = range(self._replicas)
            owner = next(
                r for r in replicas if part < bounds(self.virtual_replicas, r, self._replicas)[1]
            )
            dist.broadcast(flat, global_rank(self._group, owner), group=self._group)
        return flat


def _seeded(seed: int, part: int) -> dict[str, torch.Tensor]:
    number = mix64(seed * 0x1_0000_0001 + part) >> 1
    states = {"cpu": torch.Generator().manual_seed(number).get_state()}
    for accelerator, index in _drawn_from():
        states[accelerator.type] = accelerator.seeded(index, number)
    return states


def _random_state() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    for accelerator, index in _drawn_from():
        states[accelerator.type] = accelerator.random_state(index)
    return states


def _set_random_state(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    for accelerator, index in _drawn_from():
        if accelerator.type in states:
            accelerator.set_random_state(index, states[accelerator.type])


def _drawn_from() -> list[tuple[devices.Accelerator, int]]:
    """The current device, if there is one with a random generator."""
    found = devices.available()
    if found is None or not found.has_generators:
        return []
    return [(found, torch.accelerator.current_device_index())]
