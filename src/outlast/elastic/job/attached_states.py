"""Saves the objects in a `Job`'s `states=`, which are loaded exactly as saved, never merged.

A checkpoint loads a nested state key by key. A state whose keys have changed since the save would
then be a mixture of the saved and the current one: a history that has grown would keep its new
entries. So each state is saved with its *skeleton*, as one value: its containers and small values,
with a mark in place of everything else, mainly tensors, which are saved under separate names.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from outlast.elastic.job.parts import Part
from outlast.elastic.wrapped_modules import load_plain, plain_state_dict, unwrapped
from outlast.errors import CheckpointMismatch

_KEY = "(skeleton)"
_MARK = "\0saved by itself"  # part of the checkpoint's format
# The types that `weights_only` loads: loading them runs no code.
_CONTAINERS = (dict, list, tuple, set, OrderedDict, Counter)
_VALUES = (str, bytes, int, float, complex, bool, type(None))


class AttachedState(Part):
    """One object in `states=`. A module is saved with the plain names of its parameters."""

    def __init__(self, source: Any) -> None:
        super().__init__(unwrapped(source) if isinstance(source, nn.Module) else source)

    def save(self) -> Any:
        return pack(self.shared())

    def target(self, saved: Any) -> Any:
        if not isinstance(saved, Mapping):
            return saved
        if all(is_plain_tensor(t) for t in tree_leaves(saved) if isinstance(t, torch.Tensor)):
            return {}  # filled with the saved keys, whatever they are
        # In place: a DTensor is resharded into the current one, and a GPU need not hold both.
        return {**saved, _KEY: None}

    def load(self, state: Any, steps: int) -> None:
        """Does nothing if the checkpoint has no state for this object."""
        found = unpack(state)
        if found is not None and isinstance(self._source, nn.Module):
            load_plain(self._source, found)
        elif found is not None:
            self._source.load_state_dict(found)

    def shared(self) -> Any:
        if isinstance(self._source, nn.Module):
            return plain_state_dict(self._source)
        return self._source.state_dict()

    def live(self, shared: Any, own: Any, trusted: bool) -> Any:
        return pack(shared)


def pack(state: Any) -> Any:
    """Combines a state with its skeleton."""
    if not isinstance(state, Mapping):
        return state
    skeleton = (_skeleton(state),)  # checkpoints store a tuple as one value
    return {_KEY: skeleton} if _is_small(state) else {**state, _KEY: skeleton}


def unpack(loaded: Any) -> Any:
    """The state as it was saved; `None` if the checkpoint does not contain it.

    Raises:
        CheckpointMismatch: if a saved tensor has no counterpart in the target.
    """
    if not isinstance(loaded, Mapping):
        return loaded
    skeleton = loaded.get(_KEY)
    if isinstance(skeleton, tuple):
        return _fill(skeleton[0], loaded, "")
    return {key: value for key, value in loaded.items() if key != _KEY} or None


def is_plain_tensor(value: Any) -> bool:
    """Whether `value` is a tensor in CPU memory, and not of a subclass."""
    return type(value) is torch.Tensor and value.device.type == "cpu"


def _skeleton(value: Any) -> Any:
    if isinstance(value, Mapping):
        kind: Any = type(value) if type(value) in _CONTAINERS else dict
        return kind({key: _skeleton(inner) for key, inner in value.items()})
    if isinstance(value, list):
        return [_skeleton(inner) for inner in value]
    return value if _is_small(value) else _MARK


def _fill(skeleton: Any, loaded: Any, path: str) -> Any:
    if type(skeleton) is str and skeleton == _MARK:
        if loaded is None:
            raise CheckpointMismatch(
                f"{path[1:]!r} was saved, but the current state has no such key"
            )
        return loaded
    if isinstance(skeleton, dict):
        inner = loaded if isinstance(loaded, Mapping) else {}
        return type(skeleton)(
            {key: _fill(each, inner.get(key), f"{path}.{key}") for key, each in skeleton.items()}
        )
    if isinstance(skeleton, list):
        values = loaded if isinstance(loaded, list) else []
        values = [*values, *[None] * (len(skeleton) - len(values))]
        return [_fill(each, values[i], f"{path}.{i}") for i, each in enumerate(skeleton)]
    return skeleton


def _is_small(value: Any) -> bool:
    if type(value) in _CONTAINERS:
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return all(map(_is_small, inner))
    return type(value) in _VALUES and value != _MARK
