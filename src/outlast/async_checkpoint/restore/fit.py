"""Fits a checkpoint into a state dict: which bytes go where, resharded as needed.

What a checkpoint holds is described by its index: tensors as parts with offsets in the whole. The
parts that this rank has room for are torch.distributed.checkpoint's (`plan.describe`). Where a
saved part and a part here are the same, the bytes are read into the tensor itself; where they
overlap otherwise, or the tensor is on a GPU, into memory in between, a bounded amount at a time.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from outlast.async_checkpoint.restore.verified_read import Piece, Source, read_verified
from outlast.async_checkpoint.snapshot.structure import local_part
from outlast.async_checkpoint.state_dict.sharding import Item
from outlast.async_checkpoint.state_dict.tree import look_up
from outlast.async_checkpoint.storage.manifest import Shard, TensorEntry, ValueEntry
from outlast.errors import CheckpointError
from outlast.system.error_text import first_line
from outlast.system.shared_memory import memory_at

__all__ = [
    "Index",
    "Misfit",
    "empty_dicts",
    "fill_empty",
    "fit",
    "left_over",
    "load_tensors",
    "load_values",
    "set_values",
]

_BETWEEN_BYTES = 256 << 20  # memory in between, at a time
_SHOWN = 10  # of each kind of difference


class Misfit(CheckpointError):
    """The checkpoint is sound, but it is not of this state dict."""


@dataclasses.dataclass(frozen=True)
class Index:
    """What a checkpoint, or a part of it, holds."""

    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, ValueEntry]


def fill_empty(state_dict: dict[str, Any], index: Index) -> None:
    """Gives every empty dict of `state_dict` what the checkpoint has under it: an optimizer that
    has not made a step yet has no state to load into.
    """
    empty = set(_empty_dicts(state_dict, ()))
    if not empty:
        return
    entries: list[TensorEntry | ValueEntry] = [*index.tensors.values(), *index.values.values()]
    for entry in entries:
        path = tuple(tuple(key) if isinstance(key, list) else key for key in entry.path)
        if any(path[:length] in empty for length in range(len(path))):
            _place(state_dict, path, _room(entry))


def empty_dicts(value: Any) -> list[dict[Any, Any]]:
    """The dicts themselves that `fill_empty` would fill."""
    if isinstance(value, dict) and not value:
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [found for each in inner for found in empty_dicts(each)]


def _empty_dicts(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        if not value:
            yield path
        for key, inner in value.items():
            yield from _empty_dicts(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _empty_dicts(inner, (*path, (i,)))


def _room(entry: TensorEntry | ValueEntry) -> Any:
    if isinstance(entry, TensorEntry):
        return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    return None


def _place(root: Any, path: tuple[Any, ...], value: Any) -> None:
    """Sets what stands at `path`; makes the dicts and lists on the way."""
    for key, following in zip(path, (*path[1:], None), strict=True):
        place = key[0] if isinstance(key, tuple) else key
        if isinstance(root, list):
            root.extend([None] * (place + 1 - len(root)))
        if following is None:
            root[place] = value
            return
        present = root[place] if isinstance(root, list) else root.get(place)
        if present is None:
            present = [] if isinstance(following, tuple) else {}
            root[place] = present
        root = present


def fit(
    items: Sequence[Item],
    index: Index,
    where: str,
    strict: bool,
    optional: tuple[str, ...] = (),
) -> tuple[list[Item], list[str]]:
    """Those of `items` that are to be loaded, and the names that only the checkpoint has:
    another rank may have a place for them.

    Args:
        items: the parts of the state dict that is loaded into.
        index: what the checkpoint holds.
        where: what to call it.
        strict: whether names that only one side has are an error.
        optional: how names begin that may be on one side only all the same.

    Raises:
        Misfit: naming the keys, shapes and dtypes that differ.
    """
    names = {item.name for item in items}
    saved = {*index.tensors, *index.values}
    differences: list[str] = []
    if strict:
        differences += _few("only in the state dict", _without(names - saved, optional))
    wrong = []
    for item in items:
        entry = index.tensors.get(item.name)
        if item.kind == "tensor" and entry is not None:
            if tuple(entry.shape) != item.shape:
                wrong.append(
                    f"{item.name!r} has shape {item.shape}, {tuple(entry.shape)} was saved"
                )
            elif entry.dtype != item.dtype:
                wrong.append(f"{item.name!r} is {item.dtype}, {entry.dtype} was saved")
        elif item.kind == "tensor" and item.name in index.values:
            wrong.append(f"{item.name!r} is a tensor, a value was saved")
        elif item.kind == "value" and entry is not None:
            wrong.append(f"{item.name!r} is a value, a tensor was saved")
    differences += _few("different", wrong)
    if differences:
        raise Misfit(f"{where} does not fit the state dict: " + "; ".join(differences))
    return [item for item in items if item.name in saved], _without(saved - names, optional)


def _without(names: set[str], optional: tuple[str, ...]) -> list[str]:
    return sorted(name for name in names if not name.startswith(optional))


def left_over(names: Sequence[str], where: str) -> Misfit:
    """The error that no rank has a place for `names`."""
    return Misfit(
        f"{where} does not fit the state dict: " + _few("only in the checkpoint", names)[0]
    )


def _few(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what}: {', '.join(names[:_SHOWN])}{more}"]


def load_tensors(
    source: Source, index: Index, state_dict: Mapping[str, Any], items: Sequence[Item]
) -> int:
    """Fills the tensors of `items` with what `source` has of them; returns how many bytes.

    Raises:
        CheckpointError: at the first byte that is not what was written.
    """
    direct: list[Piece] = []
    between: list[tuple[Shard, Item, torch.Tensor]] = []
    total = 0
    for item in items:
        entry = index.tensors.get(item.name)
        if item.kind != "tensor" or entry is None:
            continue
        part = local_part(look_up(state_dict, item.path), item)
        for shard in entry.shards:
            if not _overlaps(shard, item):
                continue
            same = tuple(shard.offsets) == item.offsets and tuple(shard.sizes) == item.sizes
            if same and part.device.type == "cpu" and part.is_contiguous():
                total += part.nbytes
                direct.append(Piece(shard.file, shard.at, part.nbytes, part.data_ptr(), part))
            else:
                between.append((shard, item, part))
    read_verified(source, direct)
    return total + _load_between(source, between)


def _load_between(source: Source, between: Sequence[tuple[Shard, Item, torch.Tensor]]) -> int:
    total = 0
    waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
    pieces: list[Piece] = []
    room = _BETWEEN_BYTES
    for number, (shard, item, part) in enumerate(between):
        # Rows of the saved part that this rank needs: bytes in a row, whatever else is cut.
        low, high = _rows(shard, item)
        row_bytes = math.prod(shard.sizes[1:]) * part.element_size()
        sizes = [high - low, *shard.sizes[1:]] if shard.sizes else []
        temporary = torch.empty(sizes, dtype=part.dtype)
        at = shard.at + low * row_bytes
        pieces.append(Piece(shard.file, at, temporary.nbytes, temporary.data_ptr(), temporary))
        waiting.append(_views(shard, item, part, temporary, low))
        room -= temporary.nbytes
        if room <= 0 or number == len(between) - 1:
            read_verified(source, pieces)
            with torch.no_grad():
                for to, read in waiting:
                    to.copy_(read)
                    total += read.nbytes
            waiting, pieces, room = [], [], _BETWEEN_BYTES
    return total


def _overlaps(shard: Shard, item: Item) -> bool:
    return all(
        so < io + n and io < so + m
        for so, m, io, n in zip(shard.offsets, shard.sizes, item.offsets, item.sizes, strict=True)
    )


def _rows(shard: Shard, item: Item) -> tuple[int, int]:
    if not shard.sizes:
        return 0, 1
    low = max(item.offsets[0] - shard.offsets[0], 0)
    high = min(item.offsets[0] + item.sizes[0] - shard.offsets[0], shard.sizes[0])
    return low, high


def _views(
    shard: Shard, item: Item, part: torch.Tensor, read: torch.Tensor, low: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The overlap: in the tensor here, and in the rows that were read of the saved part."""
    to = part
    for dim, (begin, size) in enumerate(zip(shard.offsets, shard.sizes, strict=True)):
        first = max(begin, item.offsets[dim])
        length = min(begin + size, item.offsets[dim] + item.sizes[dim]) - first
        to = to.narrow(dim, first - item.offsets[dim], length)
        read = read.narrow(dim, first - begin - (low if dim == 0 else 0), length)
    return to, read


def load_values(
    source: Source, index: Index, items: Sequence[Item], weights_only: bool
) -> list[tuple[Item, Any]]:
    """The values of `items`. They are set by `set_values`, once everything has been read.

    Raises:
        CheckpointError: if one is damaged, or cannot be unpickled without running code.
    """
    wanted = [(item, index.values[item.name]) for item in items if item.name in index.values]
    buffers = [torch.empty(entry.size_bytes, dtype=torch.uint8) for _, entry in wanted]
    read_verified(
        source,
        [
            Piece(entry.file, entry.at, entry.size_bytes, buffer.data_ptr(), buffer)
            for (_, entry), buffer in zip(wanted, buffers, strict=True)
        ],
        threads=1,
    )
    found = []
    for (item, _), buffer in zip(wanted, buffers, strict=True):
        data = bytes(memory_at(buffer.data_ptr(), buffer.nbytes))
        try:
            value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
        except Exception as e:
            raise Misfit(
                f"the value {item.name!r} of {source.where} cannot be loaded: {first_line(e)}. If "
                "you trust the checkpoint, weights_only=False loads any Python object"
            ) from e
        found.append((item, value))
    return found


def set_values(state_dict: dict[str, Any], values: Sequence[tuple[Item, Any]]) -> None:
    """Puts loaded values in their places."""
    for item, value in values:
        _place(state_dict, item.path, value)
