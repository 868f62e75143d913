"""The entries of a manifest, and their checks: nothing in it is believed before these.

A manifest with a correct checksum may still be wrong: forged, or written by a program with a
mistake. msgspec checks types and ranges when it converts the entries from JSON; `Contents.check`
checks the rest. After both, a load can rely on it: every byte range lies within its file and in no
other one, every element of every tensor is in exactly one part, and the paths of tensors and values
form one tree. It takes a few sorts of the entries, even if one was made to take long.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

ITEM_BYTES = {
    **dict.fromkeys(("float64", "complex64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "complex32", "bcomplex32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "bits16"), 2),
    **dict.fromkeys(("bool", "int8", "uint8", "bits8", "bits4x2", "bits2x4", "bits1x8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    "complex128": 16,
}
"""The size of an element of each dtype (without `torch.`) that can be saved, in bytes."""

_LARGEST = 1 << 62
# A list may have more places than entries, because an empty dict in it has none.
_SPARE_PLACES = 1 << 16
_DEEPEST_CUT = 16
_MOST_UNCUT = 256

Count = Annotated[int, Meta(ge=0, lt=_LARGEST)]
"""A whole number that can be a size, an offset or a step."""
Checksum = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Index = Annotated[Sequence[Count], Meta(min_length=1, max_length=1)]
Path = Annotated[Sequence[str | int | Index], Meta(min_length=1)]
"""Each entry is a key of a dict (text or number), or `[i]` for index i of a list."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file: its name in the directory, its size, the checksum of each chunk of it."""

    name: str
    size_bytes: Count
    checksums: list[Checksum]


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A part of a tensor: its offsets in the tensor, its shape, and where its bytes are."""

    offsets: Sequence[Count]
    sizes: Sequence[Count]
    file: str
    at: Count


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A tensor: `dtype` without `torch.`, its global shape, its parts, and its place in the order
    of what was saved.
    """

    path: Path
    dtype: str
    shape: Annotated[Sequence[Count], Meta(max_length=64)]
    shards: list[Shard]
    order: Count = 0

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class ValueEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A Python value, as `torch.save` wrote it; a sparse or quantized tensor is one too."""

    path: Path
    file: str
    at: Count
    size_bytes: Count
    order: Count = 0


class Container(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A dict that the entries in it do not tell of: one without any, or of another class."""

    path: Path
    kind: Literal["dict", "OrderedDict", "Counter"]
    order: Count


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint, or a part of it, holds: files, and the rest by flat name."""

    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    values: dict[str, ValueEntry]
    containers: dict[str, Container] = {}

    @property
    def entries(self) -> dict[str, TensorEntry | ValueEntry]:
        """The tensors, then the values."""
        return {**self.tensors, **self.values}

    @property
    def in_order(self) -> list[tuple[tuple[Any, ...], TensorEntry | ValueEntry | Container]]:
        """All entries with their paths, as they were in the state: a dict before what it holds."""
        found: list[TensorEntry | ValueEntry | Container] = [*self.containers.values()]
        found += self.entries.values()
        return [(tree_path(e.path), e) for e in sorted(found, key=lambda each: each.order)]

    def check(self, chunk_bytes: int, *, complete: bool = True) -> None:
        """A `ValueError` names the first wrong entry. If `complete`, each tensor is all there."""
        for name, file in self.files.items():
            unsafe = "/" in name or "\0" in name or name in ("", ".", "..") or file.name != name
            if unsafe or len(name.encode()) > 255:
                raise ValueError(f"{name!r} is not a valid file name")
            count = -(-file.size_bytes // chunk_bytes)
            if len(file.checksums) != count:
                raise ValueError(f"the file {name!r} does not have {count} checksums")
        _check_paths(self.containers, self.tensors, self.values)
        used: dict[str, list[tuple[int, int, str]]] = {name: [] for name in self.files}
        for name, tensor in self.tensors.items():
            _check_tensor(name, tensor, complete)
            for shard in tensor.shards:
                size_bytes = math.prod(shard.sizes) * ITEM_BYTES[tensor.dtype]
                _use(used, shard.file, shard.at, size_bytes, name)
        for name, value in self.values.items():
            _use(used, value.file, value.at, value.size_bytes, name)
        for file_name, ranges in used.items():
            end, before = 0, ""
            for at, upto, name in sorted(ranges):
                if at < end:
                    raise ValueError(f"{before!r} and {name!r} use the same bytes of {file_name!r}")
                end, before = upto, name
            if end > self.files[file_name].size_bytes:
                raise ValueError(f"{before!r} is beyond the end of {file_name!r}")


def to_json(value: Any) -> bytes:
    """Of dicts, lists, tuples, entries, texts and whole numbers: equal bytes for equal values."""
    try:
        return msgspec.json.encode(value)
    except TypeError:  # of a subclass of `str` or `int`, as a key may be
        return to_json(json.loads(json.dumps(value, default=msgspec.structs.asdict)))
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value, separators=(",", ":"), default=msgspec.structs.asdict).encode()


def tree_path(path: Sequence[Any]) -> tuple[Any, ...]:
    """A path that can be a key: `(i,)` instead of `[i]` for index i of a list."""
    return tuple(tuple(key) if isinstance(key, list) else key for key in path)


def flat_name(path: Sequence[Any]) -> str:
    """The name of what is at a path, in either form."""
    return ".".join(str(key[0] if isinstance(key, list | tuple) else key) for key in path)


def is_count(value: Any) -> bool:
    """Whether it is a whole number that can be a size, an offset or a step."""
    return type(value) is int and 0 <= value < _LARGEST


def _check_tensor(name: str, tensor: TensorEntry, complete: bool) -> None:
    shape = tensor.shape
    if tensor.dtype not in ITEM_BYTES:
        raise ValueError(f"the tensor {name!r} has the dtype {tensor.dtype!r}")
    if math.prod(shape) >= _LARGEST:
        raise ValueError(f"the tensor {name!r} has the shape {shape}")
    for shard in tensor.shards:
        if shard.sizes == shape and len(shard.offsets) == len(shape) and not any(shard.offsets):
            continue
        if not (
            len(shard.offsets) == len(shard.sizes) == len(shape)
            and all(a + n <= m for a, n, m in zip(shard.offsets, shard.sizes, shape, strict=True))
        ):
            raise ValueError(f"a part of {name!r} is not within its shape {shape}: {shard}")
    if complete and not is_covered(shape, [(each.offsets, each.sizes) for each in tensor.shards]):
        raise ValueError(f"the parts of {name!r} do not cover it exactly once")


def is_covered(shape: Sequence[int], parts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether parts (offsets and sizes), each within the shape, have every element exactly once."""
    if len(parts) == 1 and tuple(parts[0][1]) == tuple(shape):
        return not any(parts[0][0])
    parts = [(offsets, sizes) for offsets, sizes in parts if all(sizes)]
    if not all(shape):
        return not parts
    rest = tuple(shape[1:])
    if shape and all(tuple(n[1:]) == rest and not any(at[1:]) for at, n in parts):  # whole rows
        end = 0
        for begin, length in sorted((at[0], n[0]) for at, n in parts):
            if begin != end:
                return False
            end += length
        return end == shape[0]
    boxes = [
        (tuple(offsets), tuple(a + n for a, n in zip(offsets, sizes, strict=True)))
        for offsets, sizes in parts
    ]
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


def _use(
    used: dict[str, list[tuple[int, int, str]]], file: str, at: int, size_bytes: int, name: str
) -> None:
    if file not in used:
        raise ValueError(f"{name!r} is in {file!r}, which is not among the files")
    if size_bytes:
        used[file].append((at, at + size_bytes, name))


def _check_paths(*entries: Mapping[str, TensorEntry | ValueEntry | Container]) -> None:
    """Checks that paths agree with names, and that all of them together form a tree of dicts and
    lists: what `fill_empty` builds from them is then no larger than they are.
    """
    root: dict[Any, Any] = {}
    lengths: dict[int, int] = {}  # of lists, by the id of their node
    dicts: set[int] = set()  # of containers
    spare = sum(map(len, entries)) + _SPARE_PLACES
    for name, entry in (each for all_of_a_kind in entries for each in all_of_a_kind.items()):
        path, is_dict = entry.path, isinstance(entry, Container)
        if flat_name(path) != name:
            raise ValueError(f"{name!r} has the path {path!r} of another name")
        node: Any = root
        for depth, key in enumerate(path, 1):
            index = key[0] if type(key) is list else None
            if (node or id(node) in dicts) and (index is not None) != (id(node) in lengths):
                raise ValueError(f"{name!r} is in a list that is a dict as well")
            if index is not None:
                length = lengths.setdefault(id(node), 0)
                lengths[id(node)] = max(length, index + 1)
                spare -= lengths[id(node)] - length
            step = key if index is None else index
            is_last = depth == len(path)
            if spare < 0 or (is_last and step in node and not is_dict):
                raise ValueError(f"{name!r} has a path that cannot be")
            node = node.setdefault(step, None if is_last and not is_dict else {})
            if node is None and not is_last:
                raise ValueError(f"{name!r} is in a tensor or a value")
        if is_dict:
            if id(node) in lengths:
                raise ValueError(f"{name!r} is a list that is a dict as well")
            dicts.add(id(node))
