"""Sums the gradients of all parts of a global batch, in the order of the parts.

The sum passes from replica to replica, as `consistent_ddp` describes. It carries a flag for each
parameter that any part has used: a parameter that no part of any replica has used gets no gradient,
as with autograd, and no optimizer changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from outlast.coordination.collectives import global_rank

_BUCKET_BYTES = 8 << 20


def views_of(flat: torch.Tensor, shaped: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of the tensors concatenated in `flat`, with the shapes of `shaped`."""
    pieces = flat.split([each.numel() for each in shaped])
    return [piece.view(each.shape) for piece, each in zip(pieces, shaped, strict=True)]


class OrderedSum:
    """Sums the gradients of one global batch after another."""

    def __init__(self, rank: int, replicas: int, group: Any) -> None:
        self._rank, self._last, self._group = rank, replicas - 1, group
        self._buckets: list[_Bucket] = []

    def begin(self, parameters: list[nn.Parameter]) -> None:
        """Starts a global batch of these trained parameters, the same on all replicas."""
        if [id(p) for bucket in self._buckets for p in bucket.parameters] != [*map(id, parameters)]:
            self._buckets = [_Bucket(each) for each in _group_into_buckets(parameters)]
        for bucket in self._buckets:
            bucket.clear(first=self._rank == 0)

    def add(self, weight: float) -> None:
        """Adds `weight` times the parameters' `grad` as this replica's next part."""
        for bucket in self._buckets:
            gradients = bucket.weighted_gradients(weight)
            if self._rank == 0:
                bucket.add(gradients)
            else:
                bucket.pending.append(gradients)  # until the sum of the earlier replicas arrives

    def finish(self) -> None:
        """Sets the parameters' `grad` to the sum over all parts of all replicas. A collective."""
        received: list[Any] = []
        if self._rank > 0:
            previous, group = global_rank(self._group, self._rank - 1), self._group
            received = [dist.irecv(bucket.flat, previous, group=group) for bucket in self._buckets]
        sent: list[Any] = []
        for i, bucket in enumerate(self._buckets):
            # While a bucket is sent to the next replica, this replica sums the following bucket.
            if self._rank > 0:
                received[i].wait()
            bucket.add_pending()
            if self._rank < self._last:
                following = global_rank(self._group, self._rank + 1)
                sent.append(dist.isend(bucket.flat, following, group=self._group))
            elif self._last > 0:
                sent.append(self._broadcast(bucket))
        if self._rank < self._last:
            for i, bucket in enumerate(self._buckets):
                sent[i].wait()
                sent[i] = self._broadcast(bucket)
        for work in sent:
            work.wait()
        for bucket in self._buckets:
            bucket.set_gradients()

    def _broadcast(self, bucket: _Bucket) -> Any:
        source = global_rank(self._group, self._last)
        return dist.broadcast(bucket.flat, source, group=self._group, async_op=True)


class _Bucket:
    """The sum of some parameters' gradients, followed by their flags: one tensor, one message."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.pending: list[list[torch.Tensor | None]] = []
        size = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(
            size + len(parameters), dtype=parameters[0].dtype, device=parameters[0].device
        )
        self._views = views_of(self.flat[:size], parameters)
        self._flags = self.flat[size:]
        self._used = [False] * len(parameters)

    def clear(self, *, first: bool) -> None:
        """Prepares for a global batch. The first replica starts the sum; the others receive it."""
        self.pending = []
        self._used = [False] * len(self.parameters)
        if first:
            self.flat.zero_()  # 0 + -0 is 0, no matter which replica adds the first gradient

    def weighted_gradients(self, weight: float) -> list[torch.Tensor | None]:
        """The parameters' gradients, multiplied by `weight`; `None` for those without one."""
        gradients = [p.grad for p in self.parameters]
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                gradient.mul_(weight)
                self._used[i] = True
        return gradients

    def add(self, gradients: list[torch.Tensor | None]) -> None:
        for total, gradient in zip(self._views, gradients, strict=True):
            if gradient is not None:
                total.add_(gradient)

    def add_pending(self) -> None:
        """Adds the pending gradients to the received sum, and sets the flags of used parameters."""
        for gradients in self.pending:
            self.add(gradients)
        self.pending = []
        if all(self._used):
            self._flags.fill_(1)
        else:
            used = torch.tensor(self._used, device=self._flags.device)
            self._flags.masked_fill_(used, 1)  # set, not counted: half precision cannot count high

    def set_gradients(self) -> None:
        """Sets the parameters' `grad` to views of the sum. The flags are read only if this replica
        has not used all parameters: reading them synchronizes with the GPU.
        """
        used = self._used if all(self._used) else (self._flags != 0).tolist()
        for parameter, view, was_used in zip(self.parameters, self._views, used, strict=True):
            parameter.grad = view if was_used else None


def _group_into_buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Splits parameters into runs of one dtype and device, of limited size."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        kind = buckets and (buckets[-1][0].dtype, buckets[-1][0].device)
        if kind != (parameter.dtype, parameter.device) or size >= _BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.nbytes
    return buckets
