"""Whether the values of tensors are all finite.

A sum tells at the speed of the memory: infinities and NaN stay in it. Only a sum that is not finite
needs a look at each value, because it may have overflowed.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from outlast.async_checkpoint.snapshot.buffers import SnapshotBuffer

# torch computes a sum of fewer elements in the calling thread alone: the cores are for training.
_CHUNK = (1 << 15) - 1
_SUMMED = (torch.float32, torch.float64, torch.bfloat16)


def total(tensor: torch.Tensor) -> torch.Tensor:
    """A sum that is not finite if a value of the floating-point or complex `tensor` is not."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype in _SUMMED:
        return tensor.sum()
    # Half precision overflows soon; torch adds no values of 8 bits.
    return (tensor if tensor.dtype == torch.half else tensor.float()).sum(dtype=torch.float32)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values of a tensor are finite; those of integers are."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if math.isfinite(total(tensor).item()):
        return True
    wide = tensor if tensor.is_complex() or tensor.itemsize > 1 else tensor.float()
    return bool(wide.isfinite().all().item())


def not_finite_in(buffer: SnapshotBuffer, names: Collection[str]) -> list[str]:
    """Which of these tensors have values that are not finite in `buffer`, as far as saved here."""
    structure, targets = buffer.structure, buffer.targets
    if structure is None or targets is None:
        return []
    wanted = set(names)
    tensors = ((n, i.name) for n, i in enumerate(structure.tensors) if i.name in wanted)
    parts = ((name, targets(number).view(-1).split(_CHUNK)) for number, name in tensors)
    return sorted({name for name, each in parts if not all(map(is_finite, each))})
