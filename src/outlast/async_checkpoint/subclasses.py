"""Tensor subclasses that wrap others: quantized weights, and the moments of 8-bit optimizers.

Such a tensor has no data of its own. It is saved as the tensors that its `__tensor_flatten__` names
(`weight.qdata`, `weight.scale`), and a text that describes the rest, under `SUBCLASS`. A restore
fills those of the tensor that is in this place now: no class is loaded from a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outlast.errors import CheckpointMismatch

SUBCLASS = "(subclass)"  # part of the checkpoint's format
# What differs between processes in the text of equal metadata: addresses and devices.
_OF_PROCESS = re.compile(r" at 0x[0-9a-f]+|device\([^)]*\)")


def wraps(value: Any) -> bool:
    """Whether `value` is a tensor that wraps others, of no class of torch's own, as `DTensor`."""
    # By its name first: torch's answer takes most of a walk over DTensors.
    is_torchs = type(value).__module__.partition(".")[0] == "torch"
    return not is_torchs and is_traceable_wrapper_subclass(value)


def inner(tensor: Any) -> dict[str, Any]:
    """What `tensor` wraps, by name; under `SUBCLASS` a text, which is equal for tensors with the
    same name of the class and metadata, and the same names, shapes and dtypes inside.
    """
    names, metadata = tensor.__tensor_flatten__()
    found = {name: getattr(tensor, name) for name in names}
    shapes = {name: (each.dtype, *each.shape) for name, each in {"": tensor, **found}.items()}
    about = _OF_PROCESS.sub("", f"{type(tensor).__name__} {metadata!r} {shapes}")
    return {SUBCLASS: about, **found}


def parts(tensor: torch.Tensor, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor with its name; or instead, of each tensor with data that it wraps."""
    if not wraps(tensor):
        yield name, tensor
        return
    for each in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from parts(getattr(tensor, each), f"{name}.{each}")


def check_same(name: str, saved: str, now: str) -> None:
    """Raises a `CheckpointMismatch` if the texts differ that `inner` has of a tensor."""
    if saved != now:
        raise CheckpointMismatch(
            f"{name!r} was saved as {saved}, and is {now} here: make it as it was saved"
        )
