"""The same bits from any number of replicas: accuracy that does not depend on the job's size.

    model = ConsistentDDP(module, virtual_replicas=8)
    loader = ElasticLoader(dataset, global_batch_size=96, virtual_replicas=8)
    for images, labels in loader:
        with model.part(loader):
            loss_fn(model(images), labels).backward()
        if loader.boundary:
            optimizer.step()
            optimizer.zero_grad()

Floating-point sums depend on their order, and so does all that follows. Here the global batch is
always cut into `virtual_replicas` parts, each with random numbers and batch-norm statistics of its
own, and the parts' gradients are added in the order of the parts: ((g0 + g1) + g2) + ..., whoever
computed them. Replicas have consecutive parts. The sum goes from replica to replica: each adds its
parts to what the one before sends, and the last tells all. A parameter that only some parts use has
the sum of theirs, and one that no part of any replica uses has no gradient: `grad` is `None`. (The
idea is known as accuracy-consistent elasticity: EasyScale, SC'23.)

What it costs: nothing of the communication runs beside the backward pass; the sum takes a hop a
replica, in buckets that follow one another, and a broadcast; the gradients of all parts of a
replica but the first are kept until the sum of the replicas before comes. A part is computed alone,
so a replica with several parts has smaller matrices to multiply. What it asks for: the same kind of
processor, the same number of torch threads, and operations that give the same result each time (on
GPUs: `torch.use_deterministic_algorithms`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from outlast.elastic.data.permutation import mixed
from outlast.elastic.numerics.ordered_sum import OrderedSum, global_rank, views_of

__all__ = ["ConsistentDDP"]


class Parts(Protocol):
    """What says which part comes: an `ElasticLoader`."""

    part: int
    weight: float
    boundary: bool


class ConsistentDDP(nn.Module):
    """Wraps a module so that its gradients are the same bits for any number of replicas.

    The parameters and buffers of rank 0 are given to all at the start.

    Args:
        module: what is trained.
        virtual_replicas: parts of every global batch; at least as many as there are ever replicas.
        group: the replicas; the default process group, or this process alone.
        seed: of the parts' random numbers.
    """

    def __init__(
        self, module: nn.Module, virtual_replicas: int, *, group: Any = None, seed: int = 0
    ) -> None:
        super().__init__()
        if dist.is_available() and dist.is_initialized():
            self._rank, self._replicas = dist.get_rank(group), dist.get_world_size(group)
        else:
            self._rank, self._replicas = 0, 1
        if not self._replicas <= virtual_replicas:
            raise ValueError(
                f"virtual_replicas={virtual_replicas} is less than the {self._replicas} replicas"
            )
        self.module = module
        self.virtual_replicas = virtual_replicas
        self._group = group
        first = self._rank * virtual_replicas // self._replicas
        last = (self._rank + 1) * virtual_replicas // self._replicas
        self.parts = range(first, last)
        if self._replicas > 1:
            with torch.no_grad():
                for tensor in (*module.parameters(), *module.buffers()):
                    dist.broadcast(tensor, global_rank(group, 0), group=group)
        self._buffers_of = {part: self._copied_buffers() for part in self.parts}
        self._random_of = {part: _seeded(seed, part) for part in self.parts}
        self._sum = OrderedSum(self._rank, self._replicas, group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def part(self, parts: Parts) -> Iterator[None]:
        """Forward and backward pass of one part. After the last part of a global batch, the
        gradients of the whole are in the parameters' `grad`.

        Args:
            parts: the loader that has just given the part.

        Raises:
            ValueError: if the part is not this replica's.
        """
        part = parts.part
        if part not in self.parts:
            raise ValueError(
                f"part {part} is not of rank {self._rank}, which has {list(self.parts)}: does the "
                f"loader have virtual_replicas={self.virtual_replicas}?"
            )
        parameters = list(self.module.parameters())
        for parameter in parameters:
            parameter.grad = None
        if part == self.parts.start:
            self._sum.begin([p for p in parameters if p.requires_grad])
        outside = _random_state()
        self._set_buffers(self._buffers_of[part])
        _set_random_state(self._random_of[part])
        try:
            yield
        finally:
            self._random_of[part] = _random_state()
            _set_random_state(outside)
        if parts.weight > 0:
            self._buffers_of[part] = self._copied_buffers()
            self._sum.add(parts.weight)
        for parameter in parameters:
            parameter.grad = None
        if parts.boundary:
            self._sum.finish()

    def average_statistics(self) -> None:
        """Gives the module the mean of the parts' buffers (batch-norm statistics), for evaluation
        and for saving. The same bits on all replicas. A collective, where there are several.
        Where the parts have the same, it stays as it is; what is no floating-point number is taken
        from the first part.
        """
        own = self._own()
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
        """What each of this replica's parts has of its own, by the number of the part. With a
        `Checkpointer`, which saves what only one rank has, it is found again by any replica.
        """
        return {
            str(part): {
                "random": dict(self._random_of[part]),
                "buffers": {str(i): b for i, b in enumerate(self._buffers_of[part])},
            }
            for part in self.parts
        }

    def load_parts_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `parts_state_dict` gave."""
        for part in self.parts:
            saved = state[str(part)]
            self._random_of[part] = {k: v.cpu() for k, v in saved["random"].items()}
            for i, buffer in enumerate(self._buffers_of[part]):
                buffer.copy_(saved["buffers"][str(i)])

    # ------------------------------------------------------------------------------ within

    def _own(self) -> list[torch.Tensor]:
        return list(self.module.buffers())

    def _copied_buffers(self) -> list[torch.Tensor]:
        return [buffer.detach().clone() for buffer in self._own()]

    def _set_buffers(self, saved: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._own(), saved, strict=True):
                buffer.copy_(value)

    def _flat_of(self, part: int, numbers: list[int]) -> torch.Tensor:
        """Some buffers of a part, one behind the other, on every replica."""
        buffers = self._buffers_of.get(part)
        if buffers is None:
            own = self._own()
            size = sum(own[i].numel() for i in numbers)
            flat = torch.empty(size, dtype=own[numbers[0]].dtype, device=own[numbers[0]].device)
        else:
            flat = torch.cat([buffers[i].flatten() for i in numbers])
        if self._replicas > 1:
            dist.broadcast(flat, global_rank(self._group, self._owner(part)), group=self._group)
        return flat

    def _owner(self, part: int) -> int:
        cuts = [r * self.virtual_replicas // self._replicas for r in range(self._replicas + 1)]
        return next(r for r in range(self._replicas) if cuts[r] <= part < cuts[r + 1])


def _seeded(seed: int, part: int) -> dict[str, torch.Tensor]:
    number = mixed(seed * 0x1_0000_0001 + part) >> 1
    states = {"cpu": torch.Generator().manual_seed(number).get_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.Generator("cuda").manual_seed(number).get_state()
    return states


def _random_state() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_state(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
