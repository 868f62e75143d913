"""Loads the content of a checkpoint into a state dict, resharded as needed.

If a saved part and a part of this rank are the same, the bytes are read into the tensor itself. If
they overlap only in part, or the tensor is on a GPU, they go through a bounded temporary buffer.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from outlast.async_checkpoint.plain_decoding import decode
from outlast.async_checkpoint.restore.fit import Index, put
from outlast.async_checkpoint.restore.verified_read import (
    Piece,
    Source,
    check_sizes,
    read_verified,
)
from outlast.async_checkpoint.snapshot.structure import local_part
from outlast.async_checkpoint.state_dict.sharding import Item
from outlast.async_checkpoint.state_dict.tree import look_up
from outlast.async_checkpoint.storage.entries import Shard
from outlast.errors import CheckpointMismatch
from outlast.system.error_text import first_line
from outlast.system.shared_memory import memory_at

_TEMPORARY_BYTES = 256 << 20  # at a time


@dataclasses.dataclass(frozen=True)
class Content:
    """What a candidate holds: the index of all of it, and sources, each with the index of what this
    rank reads from it.
    """

    index: Index
    sources: Sequence[tuple[Source, Index]]

    @property
    def where(self) -> str:
        """Its name in messages."""
        return self.sources[0][0].where


def load(
    content: Content, state_dict: dict[str, Any], items: Sequence[Item], weights_only: bool
) -> None:
    """Fills `items` of `state_dict` with the content.

    Raises:
        CheckpointError: at the first byte that differs from what was written, or for a value that
            cannot be unpickled without running code.
    """
    values: list[tuple[Item, Any]] = []
    for source, index in content.sources:
        values += _load_values(source, index, state_dict, items, weights_only)
    for source, index in content.sources:
        _load_tensors(source, index, state_dict, items)
    for item, value in values:
        put(state_dict, item.path, value)


def _load_tensors(
    source: Source, index: Index, state_dict: Mapping[str, Any], items: Sequence[Item]
) -> None:
    direct: list[Piece] = []
    indirect: list[tuple[Shard, Item, torch.Tensor]] = []
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
    source: Source,
    index: Index,
    state_dict: Mapping[str, Any],
    items: Sequence[Item],
    weights_only: bool,
) -> list[tuple[Item, Any]]:
    wanted = [(item, index.values[item.name]) for item in items if item.name in index.values]
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
