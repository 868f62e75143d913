"""What stands in `states=` of a `Job`, saved so that it comes back as it was, and no mixture.

Taken apart, key by key, a state that holds other keys when it is loaded than when it was saved
would be a mixture of both: a history that has grown since would keep what is to be forgotten. So
with each state goes its *skeleton*, one value: the containers and the small values as they were,
and a mark at the place of all else, tensors above all, which are saved by themselves under their
names.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from outlast.errors import CheckpointError

__all__ = ["opened", "packed", "room"]

_KEY = "(skeleton)"
_MARK = "\0saved by itself"
# What is loaded again without running any code (`weights_only`).
_CONTAINERS = (dict, list, tuple, set, OrderedDict, Counter)
_VALUES = (str, bytes, int, float, complex, bool, type(None))


def packed(state: Any) -> Any:
    """What is saved of a state."""
    if not isinstance(state, Mapping):
        return state
    skeleton = (_skeleton(state),)  # a tuple, which no checkpoint takes apart
    return {_KEY: skeleton} if _is_simple(state) else {**state, _KEY: skeleton}


def room(state: Any) -> Any:
    """What a state is loaded into.

    Args:
        state: as `packed` gave it, of now.
    """
    if not isinstance(state, Mapping):
        return state
    if all(map(_is_plain, _tensors(state))):
        return {}  # filled with what was saved, whatever that is
    # In place: a shard is known by the tensor it is loaded into, and a GPU need not hold both.
    return {**state, _KEY: None}


def opened(loaded: Any) -> Any:
    """The state that was loaded; `None` if there is none of it in the checkpoint.

    Raises:
        CheckpointError: if a part of it had no place here.
    """
    if not isinstance(loaded, Mapping):
        return loaded
    skeleton = loaded.get(_KEY)
    if isinstance(skeleton, tuple):
        return _filled(skeleton[0], loaded, "")
    return {key: value for key, value in loaded.items() if key != _KEY} or None


def _skeleton(value: Any) -> Any:
    if isinstance(value, Mapping):
        kind: Any = type(value) if type(value) in _CONTAINERS else dict
        return kind({key: _skeleton(inner) for key, inner in value.items()})
    if isinstance(value, list):
        return [_skeleton(inner) for inner in value]
    return value if _is_simple(value) else _MARK


def _filled(skeleton: Any, loaded: Any, path: str) -> Any:
    if type(skeleton) is str and skeleton == _MARK:
        if loaded is None:
            raise CheckpointError(
                f"{path[1:]!r} was saved, and has no place here to be loaded into"
            )
        return loaded
    if isinstance(skeleton, dict):
        inner = loaded if isinstance(loaded, Mapping) else {}
        return type(skeleton)(
            {key: _filled(each, inner.get(key), f"{path}.{key}") for key, each in skeleton.items()}
        )
    if isinstance(skeleton, list):
        there = loaded if isinstance(loaded, list) else []
        padded = [*there, *[None] * (len(skeleton) - len(there))]
        return [_filled(each, padded[i], f"{path}.{i}") for i, each in enumerate(skeleton)]
    return skeleton


def _is_simple(value: Any) -> bool:
    if type(value) in _CONTAINERS:
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return all(map(_is_simple, inner))
    return type(value) in _VALUES and value != _MARK


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [found for each in value for found in _tensors(each)] if isinstance(value, list) else []


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu"
