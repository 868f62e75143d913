"""Walks of nested state: dicts and lists, and the leaves in them.

A path is a tuple of keys; the index of a list is a tuple, `(i,)`, so that it differs from the same
number as a dict key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from outlast.errors import CheckpointUnsavable

Path = tuple[Any, ...]

_DEEP = 150  # levels, for messages


def is_leaf(value: Any) -> bool:
    """Whether a walk does not go into `value`."""
    return isinstance(value, torch.Tensor) or not isinstance(value, Mapping | list)


def nodes(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every dict, list and leaf of a state with its path, each before what it holds."""
    yield path, value
    if is_leaf(value):
        return
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from nodes(inner, (*path, (index,)))
    else:
        for key, inner in value.items():
            yield from nodes(inner, (*path, key))


def look_up(state: Any, path: Path) -> Any:
    """The value at `path`."""
    for key in path:
        state = state[key[0] if isinstance(key, tuple) else key]
    return state


def torch_path(path: Path) -> Path:
    """The path as torch.distributed.checkpoint has it: every key of a dict is text."""
    return tuple(key[0] if isinstance(key, tuple) else str(key) for key in path)


def signature_and_leaves(state: Any) -> tuple[list[Any], list[Any]]:
    """The signature, which is equal for two states with the same parts, and the leaves in order.

    Every save calls this on the training thread: it must be cheap, so it builds no paths.

    Raises:
        CheckpointUnsavable: if the state contains itself, or is nested too deeply.
    """
    signature: list[Any] = []
    leaves: list[Any] = []
    try:
        _walk(state, signature, leaves)
    except RecursionError:
        raise too_deep(state) from None
    return signature, leaves


def too_deep(state: Any) -> CheckpointUnsavable:
    """The error for a state that is too deep to be walked; names the cycle if there is one."""
    at: list[tuple[str, Any, Iterator[tuple[Any, Any]]]] = [("", state, _inner(state))]
    while at:
        for key, value in at[-1][2]:
            path = ".".join([*(each[0] for each in at[1:]), str(key)])
            for depth, (_, outer, _) in enumerate(at):
                if outer is value:
                    whole = ".".join(each[0] for each in at[1 : depth + 1]) or "the state dict"
                    return CheckpointUnsavable(
                        f"{path!r} cannot be saved: it is {whole} again, which contains it"
                    )
            if not is_leaf(value):
                if len(at) > _DEEP:
                    return CheckpointUnsavable(f"{path!r} cannot be saved: it is nested too deeply")
                at.append((str(key), value, _inner(value)))
                break
        else:
            at.pop()
    return CheckpointUnsavable("the state dict cannot be saved: it is nested too deeply")


def _inner(value: Any) -> Iterator[tuple[Any, Any]]:
    return iter(list(enumerate(value)) if isinstance(value, list) else list(value.items()))


def _walk(value: Any, signature: list[Any], leaves: list[Any]) -> None:
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        spec = getattr(value, "_spec", None)  # of a DTensor: its mesh and placements
        if spec is not None:
            signature.append((value.shape, value.dtype, spec.placements, spec.mesh))
        elif hasattr(value, "local_shards"):
            shards = [shard.metadata for shard in value.local_shards()]
            parts = [(m.shard_offsets, m.shard_sizes) for m in shards]
            whole = value.metadata()  # type: ignore[attr-defined]
            signature.append((whole.size, whole.tensor_properties.dtype, parts))
        else:
            signature.append((value.shape, value.dtype, value.layout))
    elif isinstance(value, Mapping):
        signature.append((tuple(value), tuple(map(type, value))))  # True == 1
        for inner in value.values():
            _walk(inner, signature, leaves)
    elif isinstance(value, list):
        signature.append(len(value))
        for inner in value:
            _walk(inner, signature, leaves)
    else:
        signature.append(None)
        leaves.append(value)
