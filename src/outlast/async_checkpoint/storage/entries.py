"""The entries of a manifest, and their checks: nothing in it is believed before these.

A manifest with a correct checksum may still be wrong: forged, or written by a program with a
mistake. After these checks a load can rely on it: every number is in its range, every byte range
lies within its file and in no other one, every element of every tensor is in exactly one part, and
the paths of tensors and values form one tree. The time is that of a few sorts of the entries, also
for a manifest that was made to take long.

Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Each entry is a key of a dict (text or number), or `[i]` for index i of a list.
Path = list[Any]

ITEM_BYTES = {
    **dict.fromkeys(("float64", "complex64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "complex32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "bits16"), 2),
    **dict.fromkeys(("bool", "int8", "uint8", "bits8", "bits4x2", "bits2x4", "bits1x8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **{f"{kind}{bits}": 1 for kind in ("int", "uint") for bits in range(1, 8)},
    "complex128": 16,
}
"""The size of an element of each dtype (without `torch.`) that can be saved, in bytes."""

_LARGEST = 1 << 62
_MOST_DIMENSIONS = 64
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
# A list may have more places than entries, because an empty dict in it has none.
_SPARE_PLACES = 1 << 16
_DEEPEST_CUT = 16
_MOST_UNCUT = 256


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """A file: its name in the directory, its size, the checksum of each `chunk_bytes` of it."""

    name: str
    size_bytes: int
    checksums: list[str]


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of a tensor: its offsets in the tensor, its shape, and where its bytes are."""

    offsets: list[int]
    sizes: list[int]
    file: str
    at: int


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor: `dtype` without `torch.`, its global shape, and its parts."""

    path: Path
    dtype: str
    shape: list[int]
    shards: list[Shard]


@dataclasses.dataclass(frozen=True)
class ValueEntry:
    """A Python value, as `torch.save` wrote it; a sparse or quantized tensor is one too."""

    path: Path
    file: str
    at: int
    size_bytes: int


def is_count(value: Any) -> bool:
    """Whether it is a whole number that can be a size, an offset or a step."""
    return type(value) is int and 0 <= value < _LARGEST


def parse_files(values: Mapping[str, Any], chunk_bytes: int) -> dict[str, FileEntry]:
    """The files of a manifest, from JSON.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: names what is wrong; so do the others.
    """
    files = {}
    for name, value in values.items():
        file = _entry(FileEntry, value, f"the file {name!r}")
        unsafe = "/" in name or "\0" in name or name in ("", ".", "..") or file.name != name
        if unsafe or len(name.encode()) > 255:
            raise ValueError(f"{name!r} is not a valid file name")
        if not is_count(file.size_bytes):
            raise ValueError(f"the file {name!r} has {file.size_bytes!r} bytes")
        count, sums = -(-file.size_bytes // chunk_bytes), file.checksums
        if type(sums) is not list or len(sums) != count:
            raise ValueError(f"the file {name!r} does not have {count} checksums")
        if not all(type(each) is str and _CHECKSUM.fullmatch(each) for each in sums):
            raise ValueError(f"the file {name!r} has a checksum that is none")
        files[name] = file
    return files


def parse_tensors(values: Mapping[str, Any]) -> dict[str, TensorEntry]:
    """The tensors of a manifest, from JSON."""
    tensors = {}
    for name, value in values.items():
        what = f"the tensor {name!r}"
        entry = _entry(TensorEntry, value, what)
        if entry.dtype not in ITEM_BYTES:
            raise ValueError(f"{what} has the dtype {entry.dtype!r}")
        if not _are_counts(entry.shape) or len(entry.shape) > _MOST_DIMENSIONS:
            raise ValueError(f"{what} has the shape {entry.shape!r}")
        if math.prod(entry.shape) >= _LARGEST or type(entry.shards) is not list:
            raise ValueError(f"{what} has no valid shape and shards")
        tensors[name] = dataclasses.replace(
            entry, shards=[_shard(shard, entry.shape, what) for shard in entry.shards]
        )
    return tensors


def parse_values(values: Mapping[str, Any]) -> dict[str, ValueEntry]:
    """The values of a manifest, from JSON."""
    found = {}
    for name, value in values.items():
        entry = _entry(ValueEntry, value, f"the value {name!r}")
        if type(entry.file) is not str or not is_count(entry.at) or not is_count(entry.size_bytes):
            raise ValueError(f"the value {name!r} is at {entry}")
        found[name] = entry
    return found


def check_content(
    files: Mapping[str, FileEntry],
    tensors: Mapping[str, TensorEntry],
    values: Mapping[str, ValueEntry],
    *,
    complete: bool = True,
) -> None:
    """Checks entries together. Unless `complete`, they are one rank's part: then a part of a tensor
    may be missing.

    Raises:
        ValueError: names the first entry that is wrong.
    """
    _check_paths(tensors, values)
    used: dict[str, list[tuple[int, int, str]]] = {name: [] for name in files}
    for name, tensor in tensors.items():
        item_bytes = ITEM_BYTES[tensor.dtype]
        for shard in tensor.shards:
            _use(used, shard.file, shard.at, math.prod(shard.sizes) * item_bytes, name)
        parts = [(shard.offsets, shard.sizes) for shard in tensor.shards]
        if complete and not is_covered(tensor.shape, parts):
            raise ValueError(f"the parts of {name!r} do not cover it exactly once")
    for name, value in values.items():
        _use(used, value.file, value.at, value.size_bytes, name)
    for file, ranges in used.items():
        end, before = 0, ""
        for at, upto, name in sorted(ranges):
            if at < end:
                raise ValueError(f"{before!r} and {name!r} use the same bytes of {file!r}")
            end, before = upto, name
        if end > files[file].size_bytes:
            raise ValueError(f"{before!r} is beyond the end of {file!r}")


def is_covered(shape: Sequence[int], parts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether parts (offsets and sizes), each within the shape, have every element exactly once."""
    boxes = [
        (tuple(offsets), tuple(a + n for a, n in zip(offsets, sizes, strict=True)))
        for offsets, sizes in parts
        if all(sizes)
    ]
    if not all(shape):
        return not boxes
    volume = sum(math.prod(b - a for a, b in zip(*box, strict=True)) for box in boxes)
    return volume == math.prod(shape) and _are_disjoint(boxes, 0)


_Box = tuple[tuple[int, ...], tuple[int, ...]]  # first and end index in each dimension


def _are_disjoint(boxes: list[_Box], depth: int) -> bool:
    """Whether no two boxes overlap. Cuts them apart between neighbors, in one dimension after the
    other: shards are parts of a grid, so a few cuts separate them all.
    """
    if len(boxes) <= 1:
        return True
    for dim in range(len(boxes[0][0])):
        boxes = sorted(boxes, key=lambda box: box[0][dim])
        groups: list[list[_Box]] = []
        end = -1
        for box in boxes:
            if box[0][dim] >= end:
                groups.append([])
            groups[-1].append(box)
            end = max(end, box[1][dim])
        if len(groups) > 1:
            return depth < _DEEPEST_CUT and all(_are_disjoint(g, depth + 1) for g in groups)
    return len(boxes) <= _MOST_UNCUT and not any(
        all(
            low < other_high and other_low < high
            for low, high, other_low, other_high in zip(*one, *other, strict=True)
        )
        for number, one in enumerate(boxes)
        for other in boxes[:number]
    )


def _entry(kind: type[Any], value: Any, what: str) -> Any:
    names = [field.name for field in dataclasses.fields(kind)]
    if type(value) is not dict or value.keys() != set(names):
        raise ValueError(f"{what} is not described by {', '.join(names)}")
    return kind(**value)


def _shard(value: Any, shape: list[int], what: str) -> Shard:
    shard: Shard = _entry(Shard, value, f"a part of {what}")
    fits = (
        _are_counts(shard.offsets)
        and _are_counts(shard.sizes)
        and len(shard.offsets) == len(shard.sizes) == len(shape)
        and all(a + n <= m for a, n, m in zip(shard.offsets, shard.sizes, shape, strict=True))
    )
    if not fits or type(shard.file) is not str or not is_count(shard.at):
        raise ValueError(f"a part of {what} is not within its shape {shape}: {shard}")
    return shard


def _are_counts(values: Any) -> bool:
    return type(values) is list and all(map(is_count, values))


def _use(
    used: dict[str, list[tuple[int, int, str]]], file: str, at: int, size_bytes: int, name: str
) -> None:
    if file not in used:
        raise ValueError(f"{name!r} is in {file!r}, which is not among the files")
    if size_bytes:
        used[file].append((at, at + size_bytes, name))


def _check_paths(*entries: Mapping[str, TensorEntry | ValueEntry]) -> None:
    """Checks that paths agree with names, and that all of them together form a tree of dicts and
    lists: what `fill_empty` builds from them is then no larger than they are.
    """
    root: dict[Any, Any] = {}
    lengths: dict[int, int] = {}  # of lists, by the id of their node
    spare = sum(map(len, entries)) + _SPARE_PLACES
    for name, path in ((name, entry.path) for each in entries for name, entry in each.items()):
        if type(path) is not list or not path or not all(map(_is_key, path)):
            raise ValueError(f"{name!r} has the path {path!r}")
        if ".".join(str(key[0] if type(key) is list else key) for key in path) != name:
            raise ValueError(f"{name!r} has the path {path!r} of another name")
        node: Any = root
        for depth, key in enumerate(path, 1):
            index = key[0] if type(key) is list else None
            if node and (index is not None) != (id(node) in lengths):
                raise ValueError(f"{name!r} is in a list that is a dict as well")
            if index is not None:
                length = lengths.setdefault(id(node), 0)
                lengths[id(node)] = max(length, index + 1)
                spare -= lengths[id(node)] - length
            step = key if index is None else index
            if spare < 0 or (depth == len(path) and step in node):
                raise ValueError(f"{name!r} has a path that cannot be")
            node = node.setdefault(step, None if depth == len(path) else {})
            if node is None and depth < len(path):
                raise ValueError(f"{name!r} is in a tensor or a value")


def _is_key(key: Any) -> bool:
    if type(key) is list:
        return len(key) == 1 and is_count(key[0])
    return type(key) in (str, int)
