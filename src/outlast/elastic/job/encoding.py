"""The encoding of states that ranks send each other: reading one never runs code that it names.

An own state is pickled after every step, which is fast, and consists of plain values: it is read
without access to any class. The nested state of a frozen point may contain a few more types, such
as those of a scheduler, and is read as torch reads a checkpoint with `weights_only=True`.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.serialization import safe_globals

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
    """The state of a header, which may contain objects of the classes `known`.

    Raises:
        ValueError: if it contains others that torch does not read with `weights_only=True`.
    """
    (size,) = _SIZE.unpack_from(header)
    with safe_globals(list(known)):
        try:
            return torch.load(io.BytesIO(header[_SIZE.size + size :]), weights_only=True)
        except pickle.UnpicklingError as e:
            raise ValueError(f"it contains more than tensors and plain values: {e}") from e


def load_plain(pickled: bytes) -> Any:
    """A pickled value that consists of numbers, texts, bytes, lists, tuples and dicts.

    Raises:
        ValueError: if it contains anything else.
    """
    try:
        return _Plain(io.BytesIO(pickled)).load()
    except pickle.UnpicklingError as e:
        raise ValueError(str(e)) from e


def packed(tensor: torch.Tensor) -> tuple[str, list[int], bytes]:
    """A tensor as plain values."""
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), content.numpy().tobytes()


def unpacked(value: tuple[str, list[int], bytes]) -> torch.Tensor:
    """The tensor that `packed` was given."""
    name, shape, content = value
    dtype = getattr(torch, name)
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its gradient; of a DTensor, the part of this rank."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def digest(tensor: torch.Tensor) -> str:
    """Of the tensor's contents."""
    content = local(tensor).cpu().contiguous().flatten().view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(content.numpy().data)


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")
