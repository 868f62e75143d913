"""Restores from snapshots that are still in memory.

Each rank's memory holds the parts that this rank saves. With shards, that is what it loads; what
ranks have in common (under DDP, everything) is shared out between them, and what a rank lacks is
sent round: verified where it comes from, and again where it arrives.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from outlast.async_checkpoint.restore.fit import Index, empty_dicts, fill_empty
from outlast.async_checkpoint.restore.verified_read import (
    MemorySource,
    Piece,
    Source,
    read_verified,
)
from outlast.async_checkpoint.state_dict.sharding import Item
from outlast.async_checkpoint.storage.manifest import (
    CHUNK_BYTES,
    FileEntry,
    Shard,
    TensorEntry,
    ValueEntry,
    checksum,
    pieces,
)

__all__ = ["InMemory"]

_SENT_BYTES = 64 << 20  # in one collective
_SENT = "sent"  # the name of what another rank has packed


class InMemory:
    """A snapshot that all ranks have.

    Args:
        snapshot: what this rank's writer says of its own.
        view: the memory it lies in.
        values: what belongs to it that is no tensor.
    """

    def __init__(self, snapshot: Mapping[str, Any], view: memoryview, values: bytes) -> None:
        self._snapshot = snapshot
        self._view = view
        self._values = values

    @functools.cached_property
    def told(self) -> dict[str, Any]:
        """What the other ranks need to know of this rank's part."""
        snapshot = self._snapshot
        return {
            "index": json.loads(snapshot["index"]),
            "places": snapshot["places"],
            "layout": snapshot["layout"],
            "files": snapshot["files"],
            "values": snapshot["values"],
        }

    def suffices(
        self, state_dict: dict[str, Any], items_of: Callable[[dict[str, Any]], list[Item]]
    ) -> bool:
        """Whether this rank's part is what its state dict has room for, no more and no less: then
        it needs to know nothing of the others'. So it is with shards.
        """
        if empty_dicts(state_dict):
            return False
        parts = _parts(self._index)
        own = {*self._index.tensors, *self._index.values}
        items = items_of(state_dict)
        return {item.name for item in items} == own and all(
            item.name in self._index.values or (item.name, item.offsets, item.sizes) in parts
            for item in items
        )

    def index_for(
        self,
        state_dict: dict[str, Any],
        items_of: Callable[[dict[str, Any]], list[Item]],
        told: Sequence[Mapping[str, Any]],
        rank: int,
    ) -> tuple[Index, list[str]]:
        """What all ranks' parts hold together, and the names of what this rank is to load and does
        not have in its own part. Empty dicts are filled.
        """
        others = [_index_of(each) for owner, each in enumerate(told) if owner != rank]
        own = self._index
        whole = _merged([own, *others]) if others else own
        fill_empty(state_dict, whole)
        parts = _parts(own)
        lacking = {
            item.name
            for item in items_of(state_dict)
            if ((item.name, item.offsets, item.sizes) not in parts)
            and item.name not in own.values
            and (item.name in whole.tensors or item.name in whole.values)
        }
        return whole, sorted(lacking)

    def own(self) -> tuple[Source, Index]:
        """This rank's part."""
        told = self.told
        views = {name: self._view[at : at + size] for name, at, size in self._snapshot["layout"]}
        if told["values"]:
            views[told["values"]] = memoryview(bytearray(self._values))
        files = {
            name: FileEntry(name, entry["size_bytes"], entry["checksums"])
            for name, entry in told["files"].items()
        }
        return MemorySource(self._where, views, files, CHUNK_BYTES), self._index

    def pack(self, names: Collection[str]) -> tuple[memoryview, dict[str, Any]]:
        """What this rank has under these names, verified, one thing after another; and what the
        other ranks need to know to use it.

        Raises:
            CheckpointError: if a byte is not what it was.
        """
        source, index = self.own()
        tensors = {name: entry for name, entry in index.tensors.items() if name in names}
        values = {name: entry for name, entry in index.values.items() if name in names}
        size = 0
        wanted: list[tuple[str, int, int, int]] = []
        packed_tensors: dict[str, TensorEntry] = {}
        packed_values: dict[str, ValueEntry] = {}
        for name, entry in tensors.items():
            item_bytes = getattr(torch, entry.dtype).itemsize
            shards = []
            for shard in entry.shards:
                length = math.prod(shard.sizes) * item_bytes
                wanted.append((shard.file, shard.at, length, size))
                shards.append(dataclasses.replace(shard, file=_SENT, at=size))
                size += length
            packed_tensors[name] = dataclasses.replace(entry, shards=shards)
        for name, value in values.items():
            wanted.append((value.file, value.at, value.size_bytes, size))
            packed_values[name] = dataclasses.replace(value, file=_SENT, at=size)
            size += value.size_bytes
        content = memoryview(bytearray(size))
        if size:
            base = ctypes.addressof(ctypes.c_char.from_buffer(content))
            read_verified(
                source,
                [Piece(file, at, n, base + to, content) for file, at, n, to in wanted],
            )
        checksums = [checksum(content[at : at + n]) for at, n in pieces(size)]
        return content, {
            "bytes": size,
            "checksums": checksums,
            "tensors": {n: dataclasses.asdict(e) for n, e in packed_tensors.items()},
            "values": {n: dataclasses.asdict(v) for n, v in packed_values.items()},
        }

    def rooms(
        self, packed: memoryview, told: Sequence[Mapping[str, Any]], rank: int
    ) -> list[memoryview]:
        """Memory for what each rank has packed; this rank's own is there."""
        return [
            packed if owner == rank else memoryview(bytearray(each["bytes"]))
            for owner, each in enumerate(told)
        ]

    def exchange(
        self,
        rooms: Sequence[memoryview],
        told: Sequence[Mapping[str, Any]],
        lacking: Collection[str],
        group: Any,
    ) -> list[tuple[Source, Index]]:
        """Sends what each rank has packed to all. Called on all ranks alike.

        Returns:
            The sources of what this rank lacks, and what is in each.
        """
        found: list[tuple[Source, Index]] = []
        for owner, (each, content) in enumerate(zip(told, rooms, strict=True)):
            if not each["bytes"]:
                continue
            _send(torch.frombuffer(content, dtype=torch.uint8), owner, group)
            files = {_SENT: FileEntry(_SENT, each["bytes"], each["checksums"])}
            source = MemorySource(
                f"{self._where}, sent by rank {owner}", {_SENT: content}, files, CHUNK_BYTES
            )
            tensors = {
                name: TensorEntry(**{**entry, "shards": [Shard(**s) for s in entry["shards"]]})
                for name, entry in each["tensors"].items()
                if name in lacking
            }
            values = {n: ValueEntry(**v) for n, v in each["values"].items() if n in lacking}
            found.append((source, Index(tensors, values)))
        return found

    @functools.cached_property
    def _index(self) -> Index:
        return _index_of(self.told)

    @property
    def _where(self) -> str:
        return f"the snapshot of step {self._snapshot['step']} in memory"


def _send(content: torch.Tensor, owner: int, group: Any) -> None:
    source = dist.get_global_rank(group, owner) if group is not None else owner
    on_gpu = dist.get_backend(group) == "nccl"
    for piece in content.split(_SENT_BYTES):
        if on_gpu:  # NCCL moves nothing else
            moved = piece.cuda()
            dist.broadcast(moved, source, group=group)
            piece.copy_(moved)
        else:
            dist.broadcast(piece, source, group=group)


def _parts(index: Index) -> set[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return {
        (name, tuple(shard.offsets), tuple(shard.sizes))
        for name, entry in index.tensors.items()
        for shard in entry.shards
    }


def _index_of(told: Mapping[str, Any]) -> Index:
    tensors = {
        name: TensorEntry(
            entry["path"],
            entry["dtype"],
            entry["shape"],
            [Shard(**shard) for shard in entry["shards"]],
        )
        for name, entry in told["index"]["tensors"].items()
    }
    values = {
        name: ValueEntry(path, told["values"], at, size)
        for (name, path), (at, size) in zip(told["index"]["values"], told["places"], strict=True)
    }
    return Index(tensors, values)


def _merged(indexes: Sequence[Index]) -> Index:
    tensors: dict[str, TensorEntry] = {}
    values: dict[str, ValueEntry] = {}
    for index in indexes:
        values.update(index.values)
        for name, entry in index.tensors.items():
            known = tensors.setdefault(name, TensorEntry(entry.path, entry.dtype, entry.shape, []))
            known.shards.extend(entry.shards)
    return Index(tensors, values)
