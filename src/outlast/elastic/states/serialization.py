"""What the ready-made states write: torch's serialization, without anything that runs code.

It is loaded with `weights_only=True`. So that a state which could not be loaded again is refused
when it is saved, and not after the job has died, all but the tensors is tried at once.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

__all__ = ["check_module", "dump", "parse"]

_FORMAT = 1
_SHOWN = 5


def dump(kind: str, value: Any, fileobj: BinaryIO) -> None:
    """Writes a value.

    Args:
        kind: of state.
        value: of tensors, numbers, text, and containers of these.
        fileobj: where to.

    Raises:
        ValueError: if it could not be loaded, or holds tensors of which this rank has a part only.
    """
    hollow = io.BytesIO()
    torch.save(_without_tensors(value), hollow)
    hollow.seek(0)
    try:
        torch.load(hollow, weights_only=True)
    except pickle.UnpicklingError as e:
        text = str(e).partition("WeightsUnpickler error: ")[2] or str(e)
        raise ValueError(
            f"this state could not be loaded again without running code: {text.splitlines()[0]}"
        ) from e
    torch.save({"format": _FORMAT, "kind": kind, "value": value}, fileobj)


def parse(kind: str, fileobj: BinaryIO, device: str = "cpu") -> Any:
    """What `dump` wrote.

    Args:
        kind: of state that is wanted.
        fileobj: where from.
        device: for the tensors; `meta` for their shapes alone.

    Raises:
        ValueError: if it is of another kind, or of a later format.
    """
    content = torch.load(fileobj, map_location=device, weights_only=True)
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise ValueError("another class of state has saved it")
    if content["format"] > _FORMAT:
        raise ValueError(
            f"it is of format {content['format']}, this outlast reads up to {_FORMAT}: update it"
        )
    if content["kind"] != kind:
        raise ValueError(f"{content['kind']!r} was saved, this is {kind!r}")
    return content["value"]


def check_module(own: Mapping[str, Any], saved: Any) -> None:
    """Compares the state dict of a module with one that was saved.

    Raises:
        ValueError: naming the keys and shapes that differ.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"a {type(saved).__name__} was saved, not the state of a module")
    differences = [
        *_few("only in the module", sorted(own.keys() - saved.keys())),
        *_few("only in what was saved", sorted(saved.keys() - own.keys())),
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
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what}: {', '.join(names[:_SHOWN])}{more}"]


def _is_sharded(value: Any) -> bool:
    # Where nobody has imported it, there are none; the import takes long.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _without_tensors(value: Any) -> Any:
    if _is_sharded(value):
        raise ValueError("its tensors are sharded: ShardedState saves such a module")
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, dict):
        return {key: _without_tensors(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return [_without_tensors(inner) for inner in value]
    return value
