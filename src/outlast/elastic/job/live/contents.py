"""Finds changes of tensors that torch has not counted: samples of their contents, and their place.

Programs write to parameters in ways that leave torch's counters as they are: averages of the
weights that are swapped in for a validation, by `parameter.data.copy_(...)` or `parameter.data =
...`, and updates by hand. A fault in between must not make them the state of the step before. A
digest of all contents would take too long after every step, so a few elements of each parameter are
compared: a swap changes nearly all of them. A write to few elements may remain unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_ELEMENTS = 16  # of each tensor

Sample = tuple[list[int], list[bytes]]
"""Where the tensors are in memory, and some of their elements."""


class Samples:
    """Samples the contents of the same tensors again and again."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [each for each in tensors if each.layout == torch.strided]
        self._sharded = any(isinstance(each, DTensor) for each in tensors)
        self._places: list[int] = []
        self._views: list[Any] = []

    def take(self) -> Sample:
        """The present sample; equal to another one if no change was noticed."""
        tensors = [_local(each) for each in self._tensors] if self._sharded else self._tensors
        places = [each.data_ptr() for each in tensors]
        if places != self._places:
            self._views = [view for each in tensors for view in _sampled(each.detach())]
            self._places = places
        return places, [view.tobytes() for view in self._views]


def moments_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors that an optimizer holds for the parameters."""
    return [
        value
        for moments in optimizer.state.values()
        for value in moments.values()
        if isinstance(value, torch.Tensor)
    ]


def writes_to(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Which tensors these are, and how often each was written to."""
    return list(map(id, tensors)), [0 if t.is_inference() else t._version for t in tensors]


def _sampled(tensor: torch.Tensor) -> Iterable[Any]:
    """A NumPy view of some elements in the tensor's memory; none if its elements do not lie
    together there.
    """
    if tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return []
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    dense = tensor.permute(order)
    if not dense.is_contiguous():
        return []
    content = dense.view(-1).view(torch.uint8).view(tensor.numel(), -1).numpy()
    return [content[:: max(1, tensor.numel() // _ELEMENTS)][:_ELEMENTS]]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
