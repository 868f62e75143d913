"""Restores from snapshots that are still in memory.

Each rank's memory holds the parts that the rank saves. With shards, it loads the same parts. Parts
that ranks share (under DDP, all of them) are divided among the ranks, and the parts that a rank
lacks are broadcast: verified before they are sent, and again on arrival.
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
from outlast.async_checkpoint.restore.load import Content
from outlast.async_checkpoint.restore.verified_read import (
    MemorySource,
    Piece,
    Source,
    read_verified,
)
from outlast.async_checkpoint.state_dict.sharding import Item
from outlast.async_checkpoint.storage.entries import (
    FileEntry,
    TensorEntry,
    ValueEntry,
    check_content,
    is_covered,
    parse_files,
    parse_tensors,
    parse_values,
)
from outlast.async_checkpoint.storage.manifest import CHUNK_BYTES, checksum, pieces
from outlast.coordination.agreement import Agreement
from outlast.coordination.call_ledger import CallFailure
from outlast.errors import CheckpointError

_SENT_BYTES = 64 << 20  # in one collective
_SENT = "sent"  # the name of what another rank has packed


class MemorySnapshot:
    """This rank's part of a snapshot that all ranks have, as described by its writer."""

    def __init__(self, snapshot: Mapping[str, Any], view: memoryview, values: bytes) -> None:
        self._snapshot = snapshot
        self._view = view
        self._values = values

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """What the other ranks need to know about this rank's part."""
        parts = {name: self._snapshot[name] for name in ("places", "layout", "files", "values")}
        try:
            return {**parts, "index": json.loads(self._snapshot["index"])}
        except (ValueError, TypeError, RecursionError) as e:
            raise CheckpointError(f"{self._where} is not described correctly: {e!r}") from e

    def is_sufficient(
        self, state_dict: dict[str, Any], items_of: Callable[[dict[str, Any]], list[Item]]
    ) -> bool:
        """Whether this rank's part is exactly what its state dict holds, as with shards: then the
        rank needs nothing from the other ranks' parts.
        """
        parts = _parts(self._index)  # also checks it, before other ranks wait for this one
        if empty_dicts(state_dict):
            return False
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
        descriptions: Sequence[Mapping[str, Any]],
        rank: int,
    ) -> tuple[Index, list[str]]:
        """The index of all ranks' parts together, and the names that this rank loads but its part
        lacks. Fills empty dicts.
        """
        others = [_index_of(each) for owner, each in enumerate(descriptions) if owner != rank]
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
        """The source of this rank's part, and its index."""
        description = self.description
        views = {name: self._view[at : at + size] for name, at, size in self._snapshot["layout"]}
        if description["values"]:
            views[description["values"]] = memoryview(bytearray(self._values))
        files = _files_of(description)
        return MemorySource(self._where, views, files, CHUNK_BYTES), self._index

    def pack(self, names: Collection[str]) -> tuple[memoryview, dict[str, Any]]:
        """What this rank has under these names, verified and contiguous; and the description that
        other ranks need to read it.

        Raises:
            CheckpointError: if a byte differs from what was copied.
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

    def receive_buffers(
        self, packed: memoryview, told: Sequence[Mapping[str, Any]], rank: int
    ) -> list[memoryview]:
        """A buffer for what each rank has packed; for this rank, the packed part itself."""
        return [
            packed if owner == rank else memoryview(bytearray(each["bytes"]))
            for owner, each in enumerate(told)
        ]

    def exchange(
        self,
        buffers: Sequence[memoryview],
        told: Sequence[Mapping[str, Any]],
        lacking: Collection[str],
        group: Any,
    ) -> list[tuple[Source, Index]]:
        """Broadcasts what each rank has packed. Called on all ranks.

        Returns:
            The sources of what this rank lacks, each with its index.
        """
        found: list[tuple[Source, Index]] = []
        for owner, (each, content) in enumerate(zip(told, buffers, strict=True)):
            if not each["bytes"]:
                continue
            _send(torch.frombuffer(content, dtype=torch.uint8), owner, group)
            files = {_SENT: FileEntry(_SENT, each["bytes"], each["checksums"])}
            source = MemorySource(
                f"{self._where}, sent by rank {owner}", {_SENT: content}, files, CHUNK_BYTES
            )
            tensors = {n: e for n, e in each["tensors"].items() if n in lacking}
            values = {n: v for n, v in each["values"].items() if n in lacking}
            found.append((source, Index(parse_tensors(tensors), parse_values(values))))
        return found

    @functools.cached_property
    def _index(self) -> Index:
        return _index_of(self.description)

    @property
    def _where(self) -> str:
        return f"the snapshot of step {self._snapshot['step']} in memory"


def content_in_memory(
    memory: MemorySnapshot,
    state_dict: dict[str, Any],
    items_of: Callable[[dict[str, Any]], list[Item]],
    ranks: Agreement,
    group: Any,
) -> Content | CallFailure:
    """What a snapshot holds for this rank, or the failure of one rank, the same on all. Fills empty
    dicts. Called on all ranks.

    Steps that may fail on one rank alone are attempted by all together before the next exchange, so
    that a rank out of memory, or with a damaged byte, does not leave the others waiting.
    """
    sufficient = ranks.attempt(lambda: memory.is_sufficient(state_dict, items_of))
    if isinstance(sufficient, CallFailure):
        return sufficient
    if ranks.gather(sufficient, all):
        source, index = memory.own()
        return Content(index, [(source, index)])

    described = ranks.exchange(memory.description)
    found = ranks.attempt(lambda: memory.index_for(state_dict, items_of, described, ranks.rank))
    if isinstance(found, CallFailure):
        return found
    index, lacking = found
    wanted = ranks.gather(lacking, lambda lists: sorted(set().union(*lists)))
    if not wanted:
        return Content(index, [memory.own()])

    packed = ranks.attempt(lambda: memory.pack(set(wanted)))
    if isinstance(packed, CallFailure):
        return packed
    content, description = packed
    told = ranks.exchange(description)
    buffers = ranks.attempt(lambda: memory.receive_buffers(content, told, ranks.rank))
    if isinstance(buffers, CallFailure):
        return buffers
    sent = memory.exchange(buffers, told, set(lacking), group)
    return Content(index, [memory.own(), *sent])


def _send(content: torch.Tensor, owner: int, group: Any) -> None:
    source = dist.get_global_rank(group, owner) if group is not None else owner
    on_gpu = dist.get_backend(group) == "nccl"
    for piece in content.split(_SENT_BYTES):
        if on_gpu:  # NCCL needs tensors on the GPU
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


def _files_of(description: Mapping[str, Any]) -> dict[str, FileEntry]:
    files = description["files"].items()
    return parse_files({name: {"name": name, **entry} for name, entry in files}, CHUNK_BYTES)


def _index_of(description: Mapping[str, Any]) -> Index:
    """The index of one rank's part.

    Raises:
        CheckpointError: if the description, which came from another process, cannot be true.
    """
    try:
        tensors = parse_tensors(description["index"]["tensors"])
        places = zip(description["index"]["values"], description["places"], strict=True)
        values = parse_values(
            {
                name: {"path": path, "file": description["values"], "at": at, "size_bytes": size}
                for (name, path), (at, size) in places
            }
        )
        check_content(_files_of(description), tensors, values, complete=False)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"a snapshot in memory is not described correctly: {e!r}") from e
    return Index(tensors, values)


def _merged(indexes: Sequence[Index]) -> Index:
    tensors: dict[str, TensorEntry] = {}
    values: dict[str, ValueEntry] = {}
    for index in indexes:
        values.update(index.values)
        for name, entry in index.tensors.items():
            known = tensors.setdefault(name, dataclasses.replace(entry, shards=[]))
            if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                raise CheckpointError(f"{name!r} differs between the snapshots of the ranks")
            known.shards.extend(entry.shards)
    for name, entry in tensors.items():
        if not is_covered(entry.shape, [(shard.offsets, shard.sizes) for shard in entry.shards]):
            raise CheckpointError(f"the snapshots of all ranks do not cover {name!r} exactly once")
    return Index(tensors, values)
