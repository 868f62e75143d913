"""Loads the content of a checkpoint into a state dict, resharded as needed.

First the two are compared: what fits, and what differs. A state dict in which some tensors of a
sharded model are DTensors and others are whole is refused. The optimizer of a sharded model (FSDP2)
has no state before its first step, so its `state_dict()` has an empty dict, which a restore would
fill with whole tensors. torch loads them next to parameters that are DTensors, and the next step
fails: after every restart again.

If a saved part and a part of this rank are the same, the bytes are read into the tensor itself. If
they overlap only in part, or the tensor is on a GPU, they go through a bounded temporary buffer.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from outlast.async_checkpoint.plain_values import decode
from outlast.async_checkpoint.restore.verified_read import (
    Piece,
    Source,
    check_sizes,
    read_verified,
)
from outlast.async_checkpoint.snapshot.structure import local_part
from outlast.async_checkpoint.state_dict import Item, look_up, nodes
from outlast.async_checkpoint.storage.entries import Contents, Shard, TensorEntry, tree_path
from outlast.errors import CheckpointMismatch
from outlast.system.error_text import first_line
from outlast.system.shared_memory import memory_at

_TEMPORARY_BYTES = 256 << 20  # at a time
_SHOWN = 10  # of each kind of difference


@dataclasses.dataclass(frozen=True)
class Content:
    """What a candidate holds: all of it, and the sources of what this rank reads."""

    whole: Contents
    sources: Sequence[Source]

    @property
    def where(self) -> str:
        return self.sources[0].where


def fill_empty(
    state_dict: dict[str, Any],
    contents: Contents,
    check_sizes: Callable[[Iterable[str]], None] = lambda files: None,
) -> None:
    """Fills every empty dict of `state_dict` with what the checkpoint has under it: an optimizer
    that has not stepped yet has no state to load into. `check_sizes` is called with the names of
    the files that hold it, before memory is allocated.
    """
    empty = {path for path, value in nodes(state_dict) if isinstance(value, dict) and not value}
    if not empty:
        return
    lacking = [
        (path, entry)
        for path, entry in ((tree_path(each.path), each) for each in contents.entries.values())
        if any(path[:length] in empty for length in range(len(path)))
    ]
    tensors = [entry for _, entry in lacking if isinstance(entry, TensorEntry)]
    check_sizes({shard.file for tensor in tensors for shard in tensor.shards})
    for path, entry in lacking:
        blank: torch.Tensor | None = None
        if isinstance(entry, TensorEntry):
            blank = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        put(state_dict, path, blank)


def empty_dicts(value: Any) -> list[dict[Any, Any]]:
    """The dicts that `fill_empty` would fill."""
    return [found for _, found in nodes(value) if isinstance(found, dict) and not found]


def put(root: Any, path: tuple[Any, ...], value: Any) -> None:
    """Sets the value at `path`; creates the dicts and lists on the way."""
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
    content: Content,
    strict: bool,
    optional: tuple[str, ...] = (),
) -> tuple[list[Item], list[str]]:
    """Compares the parts of a state dict with a checkpoint. Names that only one side has are an
    error if `strict`, except those that begin with an `optional` prefix.

    Returns:
        The items to load, and the names that this rank's state dict lacks; another rank's may have
        them.

    Raises:
        CheckpointMismatch: names the keys, shapes and dtypes that differ.
    """
    tensors, values = content.whole.tensors, content.whole.values
    names = {item.name for item in items}
    saved = {*tensors, *values}

    def required(missing: set[str]) -> list[str]:
        return sorted(name for name in missing if not name.startswith(optional))

    wrong = []
    for item in items:
        entry = tensors.get(item.name)
        if item.kind == "tensor" and entry is not None:
            if tuple(entry.shape) != item.shape:
                wrong.append(
                    f"{item.name!r} has shape {item.shape}, {tuple(entry.shape)} was saved"
                )
            elif entry.dtype != item.dtype:
                wrong.append(f"{item.name!r} is {item.dtype}, {entry.dtype} was saved")
        elif item.kind == "tensor" and item.name in values:
            wrong.append(f"{item.name!r} is a tensor, a value was saved")
        elif item.kind == "value" and entry is not None:
            wrong.append(f"{item.name!r} is a value, a tensor was saved")
    differences = _few("only in the state dict", required(names - saved) if strict else [])
    differences += _few("different", wrong)
    if differences:
        raise _mismatch(content.where, differences, only_names=not wrong)
    return [item for item in items if item.name in saved], required(saved - names)


def left_over(names: Sequence[str], where: str) -> CheckpointMismatch:
    """The error for names that no rank's state dict has."""
    return _mismatch(where, _few("only in the checkpoint", names), only_names=True)


def _mismatch(where: str, differences: Sequence[str], only_names: bool) -> CheckpointMismatch:
    advice = "Build the model and the optimizer as they were saved, or use another folder"
    if only_names:
        advice += "; strict=False of Checkpointer.restore ignores names that only one side has"
    return CheckpointMismatch(
        f"{where} does not fit the state dict: {'; '.join(differences)}. {advice}"
    )


def _few(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what}: {', '.join(names[:_SHOWN])}{more}"]


def check_mixture(
    state_dict: Mapping[str, Any],
    items: Sequence[Item],
    filled: Iterable[dict[Any, Any]],
    content: Content,
) -> None:
    """Checks the tensors of a state dict that has DTensors. `filled` are the dicts that were empty.

    Raises:
        CheckpointMismatch: if a tensor that was saved in parts is whole here, or if a dict was
            filled with whole tensors of the shape of a DTensor, such as an optimizer's moments;
            names the fix.
    """
    shapes = {tuple(leaf.shape) for _, leaf in nodes(state_dict) if isinstance(leaf, DTensor)}
    if not shapes:
        return
    added = {id(leaf) for each in filled for _, leaf in nodes(each)}
    whole = []
    for item in items:
        entry = content.whole.tensors.get(item.name)
        leaf = look_up(state_dict, item.path)
        if entry is None or not item.shape or not isinstance(leaf, torch.Tensor):
            continue
        if not isinstance(leaf, DTensor) and (
            len(entry.shards) > 1 or (id(leaf) in added and item.shape in shapes)
        ):
            whole.append(repr(item.name))
    if whole:
        more = f" and {len(whole) - _SHOWN} more" if len(whole) > _SHOWN else ""
        raise CheckpointMismatch(
            f"{content.where} cannot be restored into a mixture of DTensors and whole tensors: "
            f"{', '.join(whole[:_SHOWN])}{more} would be whole next to DTensors, which an "
            "optimizer cannot step. Build the state dict with get_state_dict(model, optimizer) of "
            "torch.distributed.checkpoint.state_dict, which creates the optimizer's state as "
            "DTensors, and load it with set_state_dict; or use outlast.Job"
        )


def load(
    content: Content, state_dict: dict[str, Any], items: Sequence[Item], weights_only: bool
) -> None:
    """Fills `items` of `state_dict` with the content.

    Raises:
        CheckpointError: at the first byte that differs from what was written, or for a value that
            cannot be unpickled without running code.
    """
    values: list[tuple[Item, Any]] = []
    for source in content.sources:
        values += _load_values(source, state_dict, items, weights_only)
    for source in content.sources:
        _load_tensors(source, state_dict, items)
    for item, value in values:
        put(state_dict, item.path, value)


def _load_tensors(source: Source, state_dict: Mapping[str, Any], items: Sequence[Item]) -> None:
    direct: list[Piece] = []
    indirect: list[tuple[Shard, Item, torch.Tensor]] = []
    for item in items:
        entry = source.contents.tensors.get(item.name)
        if item.kind != "tensor" or entry is None:
            continue
        part = local_part(look_up(state_dict, item.path), item)
        for shard in entry.shards:
            if not _overlaps(shard, item):
                continue
            same = tuple(shard.offsets) == item.offsets and tuple(shard.sizes) == item.sizes
            if same and part.device.type == "cpu" and part.is_contiguous():
                direct.append(Piece(shard.file, shard.at, part.nbytes, part.data_ptr(), part))
            else:
                indirect.append((shard, item, part))
    read_verified(source, direct)
    _load_indirectly(source, indirect)


def _load_indirectly(source: Source, parts: Sequence[tuple[Shard, Item, torch.Tensor]]) -> None:
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    pieces: list[Piece] = []
    left_bytes = _TEMPORARY_BYTES
    for number, (shard, item, part) in enumerate(parts):
        # The rows of the saved part that this rank needs: contiguous bytes, however the other
        # dimensions are cut.
        low, high = _rows(shard, item)
        row_bytes = math.prod(shard.sizes[1:]) * part.element_size()
        sizes = [high - low, *shard.sizes[1:]] if shard.sizes else []
        temporary = torch.empty(sizes, dtype=part.dtype)
        at = shard.at + low * row_bytes
        pieces.append(Piece(shard.file, at, temporary.nbytes, temporary.data_ptr(), temporary))
        copies.append(_views(shard, item, part, temporary, low))
        left_bytes -= temporary.nbytes
        if left_bytes <= 0 or number == len(parts) - 1:
            read_verified(source, pieces)
            with torch.no_grad():
                for to, read in copies:
                    to.copy_(read)
            copies, pieces, left_bytes = [], [], _TEMPORARY_BYTES


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
    """The overlap: its view of this rank's part, and its view of the rows that were read."""
    to = part
    for dim, (begin, size) in enumerate(zip(shard.offsets, shard.sizes, strict=True)):
        first = max(begin, item.offsets[dim])
        length = min(begin + size, item.offsets[dim] + item.sizes[dim]) - first
        to = to.narrow(dim, first - item.offsets[dim], length)
        read = read.narrow(dim, first - begin - (low if dim == 0 else 0), length)
    return to, read


def _load_values(
    source: Source, state_dict: Mapping[str, Any], items: Sequence[Item], weights_only: bool
) -> list[tuple[Item, Any]]:
    saved = source.contents.values
    wanted = [(item, saved[item.name]) for item in items if item.name in saved]
    check_sizes(source, {entry.file for _, entry in wanted})
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
            plain = torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
            value = decode(plain, like=look_up(state_dict, item.path))
        except Exception as e:
            raise CheckpointMismatch(
                f"the value {item.name!r} of {source.where} cannot be loaded: {first_line(e)}. If "
                "you trust the checkpoint, weights_only=False loads any Python object"
            ) from e
        found.append((item, value))
    return found
