"""Restores from snapshots that are still in memory.

Each rank's memory holds the parts that this rank saves. With shards, that is what it loads; what
ranks have in common (under DDP, everything) is shared out between them, and is sent round. Every
chunk is verified where it arrives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from outlast.async_checkpoint.arena import CHUNK_BYTES
from outlast.async_checkpoint.loading import (
    Index,
    fill_empty,
)
from outlast.async_checkpoint.manifest import FileEntry, Shard, TensorEntry, ValueEntry
from outlast.async_checkpoint.plan import describe
from outlast.async_checkpoint.reading import MemorySource, Source

__all__ = ["InMemory"]

_SENT_BYTES = 64 << 20  # in one collective


class InMemory:
    """A snapshot that all ranks have.

    Args:
        snapshot: what this rank's writer says of its own.
        view: the arena it lies in.
        values: what belongs to it that is no tensor.
    """

    def __init__(self, snapshot: Mapping[str, Any], view: memoryview, values: bytes) -> None:
        self._snapshot = snapshot
        self._view = view
        self._values = values

    def told(self) -> dict[str, Any]:
        """What the other ranks need to know of this rank's part."""
        snapshot = self._snapshot
        return {
            "index": json.loads(snapshot["index"]),
            "places": snapshot["places"],
            "layout": snapshot["layout"],
            "files": snapshot["files"],
            "values": snapshot["values"],
            "bytes": len(self._view),
        }

    def index_for(
        self, state_dict: dict[str, Any], told: Sequence[Mapping[str, Any]], rank: int
    ) -> tuple[Index, bool]:
        """What all ranks' parts hold together, and whether this rank's own part has all that it is
        to load. Empty dicts are filled.
        """
        indexes = [_index_of(each) for each in told]
        whole = _merged(indexes)
        fill_empty(state_dict, whole)
        own = indexes[rank]
        parts = {
            (name, tuple(shard.offsets), tuple(shard.sizes))
            for name, entry in own.tensors.items()
            for shard in entry.shards
        }
        enough = all(
            (item.name, item.offsets, item.sizes) in parts
            if item.kind == "tensor"
            else item.name in own.values
            for item in describe(state_dict)
        )
        return whole, enough

    def gather(
        self, told: Sequence[Mapping[str, Any]], rank: int, group: Any, sharing: bool
    ) -> list[tuple[Source, Index]]:
        """This rank's part, and the other ranks' if they are shared. Called on all ranks alike."""
        sources: list[tuple[Source, Index]] = []
        where = f"the snapshot of step {self._snapshot['step']} in memory of rank"
        for owner, each in enumerate(told):
            if owner != rank and not sharing:
                continue
            view, values = self._view, self._values
            if sharing:
                view, values = _sent(owner, rank, each, view, values, group)
            views = {name: view[at : at + size] for name, at, size in each["layout"]}
            if each["values"]:
                views[each["values"]] = memoryview(bytearray(values))
            files = {
                name: FileEntry(name, entry["size_bytes"], entry["checksums"])
                for name, entry in each["files"].items()
            }
            source = MemorySource(f"{where} {owner}", views, files, CHUNK_BYTES)
            sources.append((source, _index_of(each)))
        return sources


def _sent(
    owner: int, rank: int, told: Mapping[str, Any], view: memoryview, values: bytes, group: Any
) -> tuple[memoryview, bytes]:
    """The owner's arena and values, on every rank."""
    values_bytes = sum(size for _, size in told["places"])
    content = memoryview(bytearray(told["bytes"] + values_bytes))
    whole = torch.frombuffer(content, dtype=torch.uint8)
    if owner == rank:
        whole[: told["bytes"]] = torch.frombuffer(view, dtype=torch.uint8)
        if values:
            whole[told["bytes"] :] = torch.frombuffer(bytearray(values), dtype=torch.uint8)
    source = dist.get_global_rank(group, owner) if group is not None else owner
    on_gpu = dist.get_backend(group) == "nccl"
    for piece in whole.split(_SENT_BYTES):
        if on_gpu:  # NCCL moves nothing else
            moved = piece.cuda()
            dist.broadcast(moved, source, group=group)
            piece.copy_(moved)
        else:
            dist.broadcast(piece, source, group=group)
    return content[: told["bytes"]], bytes(content[told["bytes"] :])


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
