"""Tensor subclasses that wrap others: quantized weights, and the moments of 8-bit optimizers.

Such a tensor has no data of its own. It is saved as the tensors that its `__tensor_flatten__` names
(`weight.qdata`, `weight.scale`), and a text that describes the rest, under `SUBCLASS`. A restore
fills those of the tensor that is in this place now: no class is loaded from a checkpoint.

Subclasses of torch's own, such as `DTensor`, do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outlast.errors import CheckpointMismatch

SUBCLASS = "(subclass)"  # part of the checkpoint's format
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# What differs between processes in the text of equal metadata: addresses and devices.
_OF_PROCESS = re.compile(r" at 0x[0-9a-f]+|device\([^)]*\)")


def wraps(value: Any) -> bool:
    """Whether `value` is a tensor that wraps others, of a class that is not torch's own."""
    return (
        type(value) not in _PLAIN
        and is_traceable_wrapper_subclass(value)
        and not type(value).__module__.startswith("torch.")
    )


def inner(tensor: Any) -> dict[str, Any]:
    """What `tensor` wraps, by name; under `SUBCLASS` a text, which is equal for tensors with the
    same name of the class, shape, dtype and metadata.
    """
    names, metadata = tensor.__tensor_flatten__()
    about = f"{type(tensor).__name__} {tuple(tensor.shape)} of {tensor.dtype}, {metadata!r}"
    return {SUBCLASS: _OF_PROCESS.sub("", about), **{n: getattr(tensor, n) for n in names}}


def parts(tensor: torch.Tensor, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor with its name; or instead, of each tensor with data that it wraps."""
    if not wraps(tensor):
        yield name, tensor
        return
    for each in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from parts(getattr(tensor, each), f"{name}.{each}")


def rewrap(loaded: Any, present: Any, where: str) -> None:
    """Fills the subclasses of `present` from the dicts that a `loaded` state has in their places,
    and puts them there. `where` is the name of the state.

    Raises:
        CheckpointMismatch: if another tensor is there now, or none; names it.
    """
    for key, value in list(loaded.items() if isinstance(loaded, dict) else enumerate(loaded)):
        if not isinstance(value, dict | list):
            continue
        now = None
        if isinstance(present, Mapping):
            now = present.get(key)
        elif isinstance(present, list) and key < len(present):
            now = present[key]
        if isinstance(value, dict) and SUBCLASS in value:
            _fill(now, value, f"{where}.{key}")
            loaded[key] = now
        else:
            rewrap(value, now, f"{where}.{key}")


def has_wrapped(loaded: Any) -> bool:
    """Whether a loaded state has something for `rewrap`."""
    if not isinstance(loaded, dict | list):
        return False
    found = loaded.values() if isinstance(loaded, dict) else loaded
    return SUBCLASS in loaded or any(map(has_wrapped, found))


def _fill(tensor: Any, loaded: Mapping[str, Any], name: str) -> None:
    found = inner(tensor) if wraps(tensor) else {}
    check_same(name, loaded[SUBCLASS], found.get(SUBCLASS, f"a {type(tensor).__name__}"))
    for key, value in loaded.items():
        if isinstance(value, Mapping):
            _fill(found.get(key), value, f"{name}.{key}")
        elif key != SUBCLASS:
            now = found.get(key)
            if not isinstance(now, torch.Tensor) or now.shape != value.shape:
                raise CheckpointMismatch(f"'{name}.{key}' has another shape than was saved")
            with torch.no_grad():
                now.copy_(value)


def check_same(name: str, saved: str, now: str) -> None:
    """Raises a `CheckpointMismatch` if the texts differ that `inner` has of a tensor."""
    if saved != now:
        raise CheckpointMismatch(
            f"{name!r} was saved as {saved}, and is {now} here: build the model and the optimizer "
            "as they were saved"
        )
