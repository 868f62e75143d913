"""The encoding of states: in a checkpoint, and between ranks.

Reading what another rank has sent never runs code that it names. An own state, which is pickled
after every step, is read as the values of a checkpoint are (`plain_values`). The nested state of a
survivor may contain a few more types, as of a scheduler: read as with `weights_only=True` of torch.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.serialization import safe_globals

from outlast.async_checkpoint import torch_values
from outlast.async_checkpoint.plain_values import Unsavable, decode, encode
from outlast.elastic.tensors import bytes_of, memory_of
from outlast.errors import CheckpointMismatch

KEY = "(skeleton)"
_MARK = "\0saved by itself"  # part of the checkpoint's format
# The types that `weights_only` loads: loading them runs no code.
_CONTAINERS = (dict, list, tuple, set, OrderedDict, Counter)
_VALUES = (str, bytes, int, float, complex, bool, type(None))
_SIZE = struct.Struct("<Q")

Shapes = list[tuple[str, tuple[int, ...]]]
"""The type and the shape of each tensor, in their order."""


def dump_header(state: Any, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> bytes:
    """What is sent before the contents of the tensors: their shapes, and the rest of the state."""
    content = io.BytesIO()
    torch.save(state, content)
    described = json.dumps(shapes).encode()
    return _SIZE.pack(len(described)) + described + content.getvalue()


def load_shapes(header: bytes) -> Shapes:
    """The shapes of a header."""
    (size,) = _SIZE.unpack_from(header)
    found = json.loads(header[_SIZE.size : _SIZE.size + size])
    return [(name, tuple(shape)) for name, shape in found]


def load_state(header: bytes, known: Sequence[type]) -> Any:
    """The state of a header; a `ValueError` for classes neither `known` nor safe for torch."""
    (size,) = _SIZE.unpack_from(header)
    with safe_globals(list(known)):
        try:
            return torch_values.read(header[_SIZE.size + size :], map_location=None)
        except pickle.UnpicklingError as e:
            raise ValueError(f"it contains more than tensors and plain values: {e}") from e


def dump_plain(value: Any) -> bytes:
    """A pickled value: equal bytes for equal tensors, which pickle does not give."""
    content = io.BytesIO()
    _Pickler(content).dump(value)
    return content.getvalue()


def load_plain(pickled: bytes) -> Any:
    """A value of `dump_plain`, if no code of its own runs for it; else a `ValueError`."""
    try:
        return _Plain(io.BytesIO(pickled)).load()
    except pickle.UnpicklingError as e:
        raise ValueError(str(e)) from e


def packed(tensor: torch.Tensor) -> tuple[str, list[int], bytes]:
    """A tensor as plain values."""
    content = bytes_of(tensor).cpu()
    name = str(tensor.dtype).removeprefix("torch.")
    return name, list(tensor.shape), memory_of(content).tobytes()


def unpacked(value: tuple[str, list[int], bytes]) -> torch.Tensor:
    """The tensor that `packed` was given."""
    name, shape, content = value
    dtype = getattr(torch, name)
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if is_plain_tensor(value):
            return unpacked, (packed(value),)
        if isinstance(value, type | torch.Tensor) or type(value) in _SAFE:
            return NotImplemented
        with contextlib.suppress(Unsavable):  # whoever has it itself can read it all the same
            if (node := encode(value)) is not value:
                return decode, (node,)
        return NotImplemented


_SAFE = (complex, bytearray, OrderedDict, Counter, torch.Size, torch.device)
_READERS: dict[Any, Any] = {(e.__module__, e.__name__): e for e in (unpacked, decode, *_SAFE)}
_READERS |= {("torch", name): e for name, e in vars(torch).items() if type(e) is torch.dtype}


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _READERS:
            return _READERS[module, name]
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")


def pack(state: Any) -> Any:
    """A state as a checkpoint has it, so that it is loaded exactly as saved, and never merged.

    A checkpoint loads a nested state key by key: a history that has grown since would keep its new
    entries. So each state is saved with its *skeleton*, as one value: its containers and small
    values, with a mark in place of what is saved under separate names, mainly tensors.
    """
    if not isinstance(state, Mapping):
        return state
    skeleton = (_skeleton(state),)  # checkpoints store a tuple as one value
    return {KEY: skeleton} if _is_small(state) else {**state, KEY: skeleton}


def unpack(loaded: Any) -> Any:
    """The saved state, or `None`. A saved tensor that the target does not have is an error."""
    if not isinstance(loaded, Mapping):
        return loaded
    skeleton = loaded.get(KEY)
    if isinstance(skeleton, tuple):
        return _fill(skeleton[0], loaded, "")
    return {key: value for key, value in loaded.items() if key != KEY} or None


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
