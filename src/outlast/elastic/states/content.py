"""The content of a ready-made state: torch's serialization, without anything that runs code.

It is loaded with `weights_only=True`. A state that could not be loaded is refused when it is saved,
not after a job failure.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from outlast.async_checkpoint.plain_values import Unsavable, decode, encode
from outlast.system.units import listed

_FORMAT = 1
_SHOWN = 5


def dump(kind: str, value: Any, fileobj: BinaryIO) -> None:
    """Writes a value of what `async_checkpoint.plain_values` lists, for a `kind` of state; a
    `ValueError` if it could not be loaded, or holds sharded tensors.
    """
    _refuse_sharded(value)
    try:
        plain = encode(value)
    except Unsavable as e:
        place = f" ({e.where.lstrip('.')})" if e.where else ""
        raise ValueError(f"this state{place} cannot be saved: {e}") from e
    torch.save({"format": _FORMAT, "kind": kind, "value": plain}, fileobj)


def parse(kind: str, fileobj: BinaryIO, device: str = "cpu") -> Any:
    """Reads a value that `dump` wrote, with its tensors on `device`: `meta` reads only shapes. A
    `ValueError` if it is of another kind, or has a later format.
    """
    content = torch.load(fileobj, map_location=device, weights_only=True)
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise ValueError("it was saved by another class of state")
    if content["format"] > _FORMAT:
        raise ValueError(
            f"it has format {content['format']}, and this outlast reads up to {_FORMAT}: "
            "update outlast"
        )
    if content["kind"] != kind:
        raise ValueError(f"{content['kind']!r} was saved, this is {kind!r}")
    return decode(content["value"])


def check_module(own: Mapping[str, Any], saved: Any) -> None:
    """Compares the state dict of a module with a saved one; a `ValueError` names what differs."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"a {type(saved).__name__} was saved, not the state of a module")
    differences = [
        *_few("only in the module", sorted(own.keys() - saved.keys())),
        *_few("only in the saved state", sorted(saved.keys() - own.keys())),
    ]
    shapes = []
    for key in sorted(own.keys() & saved.keys()):
        here, there = own[key], saved[key]
        if isinstance(here, UninitializedParameter | UninitializedBuffer):
            continue  # it takes any shape
        if not isinstance(here, torch.Tensor) or not isinstance(there, torch.Tensor):
            continue
        if here.shape != there.shape:
            shapes.append(f"{key} is {tuple(here.shape)}, {tuple(there.shape)} was saved")
    differences += _few("of another shape", shapes)
    if differences:
        raise ValueError("; ".join(differences))


def _few(what: str, names: list[str]) -> list[str]:
    return [f"{what}: {listed(names, _SHOWN)}"] if names else []


def _is_sharded(value: Any) -> bool:
    # If the module is not imported, there are no DTensors; importing it is slow.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _refuse_sharded(value: Any) -> None:
    if _is_sharded(value):
        raise ValueError("its tensors are sharded: ShardedState saves such a module")
    if isinstance(value, dict | list | tuple) and not isinstance(value, torch.Size):
        for inner in value.values() if isinstance(value, dict) else value:
            _refuse_sharded(inner)
