"""Compares two checkpoints bit by bit, saved by any number of ranks; reads only what may differ."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from outlast.async_checkpoint.restore.verified_read import Source
from outlast.async_checkpoint.restore.whole_tensors import batches, read_tensors, read_value
from outlast.async_checkpoint.storage.entries import ITEM_BYTES, Shard, TensorEntry, ValueEntry
from outlast.async_checkpoint.storage.manifest import checksum

_SLICE = 1 << 20  # elements that are compared at a time
_SHOWN = 60  # characters of a value


@dataclasses.dataclass
class TensorDifference:
    """How two tensors of one dtype and shape differ.

    Attributes:
        differing: the number of elements with other bits, of all `elements`.
        first: the index of the first of them.
        max_abs: the largest difference of finite elements; `None` if there is none, or if the dtype
            has no numbers that can be computed with.
        max_rel: the largest difference relative to the larger element of the pair; `None` likewise.
        non_finite: the number of differing elements that are NaN or infinite in a checkpoint.
    """

    name: str
    dtype: str
    shape: list[int]
    elements: int
    differing: int = 0
    first: list[int] = dataclasses.field(default_factory=list)
    max_abs: float | None = None
    max_rel: float | None = None
    non_finite: int = 0


@dataclasses.dataclass
class Difference:
    """What differs between two checkpoints: names that only one of them has; those of other kind,
    dtype or shape in each (`kinds`); tensors; values, as text; how many names are `equal`.
    """

    only_in_a: list[str] = dataclasses.field(default_factory=list)
    only_in_b: list[str] = dataclasses.field(default_factory=list)
    kinds: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    tensors: list[TensorDifference] = dataclasses.field(default_factory=list)
    values: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    equal: int = 0

    def __bool__(self) -> bool:
        return any((self.only_in_a, self.only_in_b, self.kinds, self.tensors, self.values))


def compare(a: Source, b: Source) -> Difference:
    """Compares two checkpoints: all tensors and values. What has equal checksums is not read. A
    `CheckpointError` if a part that is read is missing or damaged. A `CheckpointReadError` if a
    file cannot be read now.
    """
    one, other = a.contents.entries, b.contents.entries
    found = Difference(sorted(one.keys() - other), sorted(other.keys() - one))
    both = sorted(one.keys() & other)
    suspects = []
    for name in both:
        kinds = _kind(one[name]), _kind(other[name])
        if kinds[0] != kinds[1]:
            found.kinds[name] = kinds
        elif _stored(a, one[name]) != _stored(b, other[name]):
            suspects.append(name)
    tensors = a.contents.tensors
    for batch in batches(a, (name for name in suspects if name in tensors)):
        left, right = read_tensors(a, batch), read_tensors(b, batch)
        compared = (_compare(name, tensors[name], left[name], right[name]) for name in batch)
        found.tensors += [each for each in compared if each.differing]
    found.tensors.sort(key=lambda each: each.name)
    for name in suspects:
        if name not in tensors and (
            texts := _compare_values(read_value(a, name), read_value(b, name))
        ):
            found.values[name] = texts
    found.equal = len(both) - len(found.kinds) - len(found.tensors) - len(found.values)
    return found


def _kind(entry: TensorEntry | ValueEntry) -> str:
    return f"{entry.dtype} {entry.shape}" if isinstance(entry, TensorEntry) else "a value"


def _stored(source: Source, entry: TensorEntry | ValueEntry) -> Any:
    """The parts, with the checksums and the place in their chunks: if equal, so is the data."""
    parts: list[tuple[Shard | ValueEntry, Sequence[int], Sequence[int], int]]
    if isinstance(entry, TensorEntry):
        parts = [
            (each, each.offsets, each.sizes, math.prod(each.sizes) * ITEM_BYTES[entry.dtype])
            for each in entry.shards
        ]
    else:
        parts = [(entry, [], [], entry.size_bytes)]
    length, found = source.chunk_bytes, []
    for part, offsets, sizes, size_bytes in parts:
        if size_bytes:
            chunks = slice(part.at // length, -(-(part.at + size_bytes) // length))
            checksums = source.contents.files[part.file].checksums[chunks]
            found.append((offsets, sizes, size_bytes, part.at % length, checksums))
    return length, sorted(found)


def _compare(
    name: str, tensor: TensorEntry, left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]
) -> TensorDifference:
    found = TensorDifference(name, tensor.dtype, list(tensor.shape), left.size)
    for begin in range(0, left.size, _SLICE):
        one, other = (each.reshape(-1)[begin : begin + _SLICE] for each in (left, right))
        words = f"u{min(left.itemsize, 8)}"
        unequal = one.view(words) != other.view(words)
        at = np.flatnonzero(unequal.reshape(-1, 2).any(axis=1) if left.itemsize > 8 else unequal)
        if not len(at):
            continue
        if not found.differing:
            index = np.unravel_index(begin + int(at[0]), left.shape)
            found.first = [int(i) for i in index]
        found.differing += len(at)
        _measure(found, _numbers(one[at], tensor.dtype), _numbers(other[at], tensor.dtype))
    return found


def _numbers(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any] | None:
    """Elements as numbers of 64 bits that represent them exactly; `None` if they are no numbers."""
    if dtype == "bool" or (dtype.startswith("uint") and hasattr(np, dtype)):
        return values.view("uint8" if dtype == "bool" else dtype).astype(np.uint64)
    if dtype.startswith("int") and hasattr(np, dtype):
        return values.view(dtype).astype(np.int64)
    import torch  # has more dtypes than NumPy

    content = torch.from_numpy(values.view(np.uint8)).view(getattr(torch, dtype))
    wide = torch.complex128 if content.is_complex() else torch.float64
    try:
        return content.to(wide).numpy()
    except RuntimeError:  # bits8, int3, float4_e2m1fn_x2 (two numbers in one element)
        return None


def _measure(
    found: TensorDifference, one: np.ndarray[Any, Any] | None, other: np.ndarray[Any, Any] | None
) -> None:
    if one is None or other is None:
        return
    gaps: np.ndarray[Any, Any]
    if one.dtype.kind in "iu":
        # Exact as unsigned integers, which wrap around.
        low, high = np.minimum(one, other), np.maximum(one, other)
        gaps = high.astype(np.uint64) - low.astype(np.uint64)
        one, other = one.astype(np.float64), other.astype(np.float64)
    else:
        finite = np.isfinite(one) & np.isfinite(other)
        found.non_finite += int(np.count_nonzero(~finite))
        one, other = one[finite], other[finite]
        gaps = np.abs(one - other)
    if not len(gaps):
        return
    sizes = np.maximum(np.abs(one), np.abs(other))
    relative = gaps / np.where(sizes > 0, sizes, 1)  # no size, no gap: 0.0 and -0.0
    found.max_abs = max(found.max_abs or 0, gaps.max().item())
    found.max_rel = max(found.max_rel or 0.0, float(relative.max()))


def _compare_values(one: bytes, other: bytes) -> tuple[str, str] | None:
    """Both values as text, if they differ."""
    if one == other:
        return None
    texts = _text(one), _text(other)
    # The pickles of equal values may differ. The text of a number has all its bits, that of a
    # tensor is abridged.
    if texts[0] == texts[1] and "tensor(" not in texts[0]:
        return None
    short = [text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..." for text in texts]
    return short[0], short[1]


def _text(content: bytes) -> str:
    from outlast.async_checkpoint import torch_values

    try:
        value = torch_values.read(content)
    except pickle.UnpicklingError:  # of a class that only the program has
        return f"an object {checksum(content)}"
    return " ".join(repr(value).split())
