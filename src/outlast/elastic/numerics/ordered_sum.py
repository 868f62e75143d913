"""The gradients of all parts of a global batch, added in the order of the parts, whoever has them.

Replicas have consecutive parts. The sum goes from replica to replica: each adds its parts to what
the one before sends, and the last tells all. With the sum goes a mark for each parameter that some
part has used: one that no part of any replica has used is left without a gradient, as autograd
leaves it, and no optimizer moves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["OrderedSum", "global_rank", "views_of"]

_BUCKET_BYTES = 8 << 20


def global_rank(group: Any, rank: int) -> int:
    """The rank in the job of a rank in a group."""
    return rank if group is None else dist.get_global_rank(group, rank)


def views_of(flat: torch.Tensor, shaped: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What stands one behind the other in `flat`, each in its shape."""
    pieces = flat.split([each.numel() for each in shaped])
    return [piece.view(each.shape) for piece, each in zip(pieces, shaped, strict=True)]


class OrderedSum:
    """Adds up the gradients of one global batch after another.

    Args:
        rank: of this replica.
        replicas: how many there are.
        group: in which they are.
    """

    def __init__(self, rank: int, replicas: int, group: Any) -> None:
        self._rank = rank
        self._last = replicas - 1
        self._group = group
        self._buckets: list[_Bucket] = []

    def begin(self, parameters: list[nn.Parameter]) -> None:
        """Begins a global batch, with no gradients yet; one that was given up is forgotten.

        Args:
            parameters: those that are trained, on all replicas the same.
        """
        if [id(p) for bucket in self._buckets for p in bucket.parameters] != [*map(id, parameters)]:
            self._buckets = [_Bucket(each) for each in _alike(parameters)]
        for bucket in self._buckets:
            bucket.clear(first=self._rank == 0)

    def add(self, weight: float) -> None:
        """Adds what is in the parameters' `grad`: that of the next part of this replica.

        Args:
            weight: what to multiply it by.
        """
        for bucket in self._buckets:
            gradients = bucket.taken(weight)
            if self._rank == 0:
                bucket.add(gradients)
            else:
                bucket.waiting.append(gradients)  # for the sum of the replicas before

    def finish(self) -> None:
        """Gives the parameters the sum over all parts of all replicas. A collective."""
        coming: list[Any] = []
        if self._rank > 0:
            before = global_rank(self._group, self._rank - 1)
            for bucket in self._buckets:
                coming.append(dist.irecv(bucket.flat, before, group=self._group))
        going: list[Any] = []
        for i, bucket in enumerate(self._buckets):
            # A bucket goes on to the next replica while this one adds up the one behind it.
            if self._rank > 0:
                coming[i].wait()
            bucket.close()
            if self._rank < self._last:
                after = global_rank(self._group, self._rank + 1)
                going.append(dist.isend(bucket.flat, after, group=self._group))
            elif self._last > 0:
                going.append(self._told(bucket))
        if self._rank < self._last:
            for i, bucket in enumerate(self._buckets):
                going[i].wait()
                going[i] = self._told(bucket)
        for work in going:
            work.wait()
        for bucket in self._buckets:
            bucket.give()

    def _told(self, bucket: _Bucket) -> Any:
        """The last replica, which has the sum, tells all."""
        source = global_rank(self._group, self._last)
        return dist.broadcast(bucket.flat, source, group=self._group, async_op=True)


class _Bucket:
    """The sum of the gradients of some parameters and, behind it, their marks, in one piece: so
    that the marks cost no message of their own.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.waiting: list[list[torch.Tensor | None]] = []
        size = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(
            size + len(parameters), dtype=parameters[0].dtype, device=parameters[0].device
        )
        self._views = views_of(self.flat[:size], parameters)
        self._marks = self.flat[size:]
        self._used = [False] * len(parameters)

    def clear(self, *, first: bool) -> None:
        """For the next global batch. The first replica begins the sum; others are sent it."""
        self.waiting = []
        self._used = [False] * len(self.parameters)
        if first:
            self.flat.zero_()  # and 0 + -0 is 0: it does not matter who adds the first

    def taken(self, weight: float) -> list[torch.Tensor | None]:
        """The gradients that are in the parameters; none where the part has not used one."""
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

    def close(self) -> None:
        """Adds what waits for the sum of the replicas before, and marks what was used here."""
        for gradients in self.waiting:
            self.add(gradients)
        self.waiting = []
        if all(self._used):
            self._marks.fill_(1)
        else:
            used = torch.tensor(self._used, device=self._marks.device)
            self._marks.masked_fill_(used, 1)  # set and not counted: half precision counts not far

    def give(self) -> None:
        """Gives the parameters their sums. What was used here was used: only else are the marks
        looked at, for which a GPU has to be waited for.
        """
        used = self._used if all(self._used) else (self._marks != 0).tolist()
        for parameter, view, was_used in zip(self.parameters, self._views, used, strict=True):
            parameter.grad = view if was_used else None


def _alike(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one dtype and device that go together."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        alike = buckets and (buckets[-1][0].dtype, buckets[-1][0].device)
        if alike != (parameter.dtype, parameter.device) or size >= _BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.nbytes
    return buckets
