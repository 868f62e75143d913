"""The contents of a checkpoint across all ranks, for its manifest and for plain PyTorch."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from outlast.async_checkpoint.snapshot.structure import Structure, values_file
from outlast.async_checkpoint.state_dict.last_value import Last
from outlast.async_checkpoint.state_dict.tree import torch_path
from outlast.async_checkpoint.storage.entries import Shard, TensorEntry, ValueEntry


class Catalog:
    """The contents of a checkpoint across all ranks, and where they are. It never changes."""

    def __init__(self, structures: Mapping[int, Structure]) -> None:
        self.structures = dict(structures)
        self.tensors: dict[str, TensorEntry] = {}
        self._described: dict[str, Any] = {}
        self._stored: dict[MetadataIndex, _StorageInfo] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._metadata: Last[bytes] = Last()
        for structure in self.structures.values():
            self._add(structure)

    def values(self, places: Mapping[int, Sequence[Sequence[int]]]) -> dict[str, ValueEntry]:
        """The place of each value, from offsets and sizes that each rank has reported."""
        found = {}
        for rank, structure in self.structures.items():
            for item, (at, size_bytes) in zip(structure.values, places[rank], strict=True):
                found[item.name] = ValueEntry(_listed(item.path), values_file(rank), at, size_bytes)
        return found

    def metadata(self, values: Mapping[str, ValueEntry]) -> bytes:
        """The `.metadata` file of torch.distributed.checkpoint, for loading with plain PyTorch. It
        stays the same while the values have the same sizes.
        """
        return self._metadata.of(dict(values), lambda: self._pickle(values))

    def _pickle(self, values: Mapping[str, ValueEntry]) -> bytes:
        described = dict(self._described)
        stored = dict(self._stored)
        for name, entry in values.items():
            described[name] = BytesStorageMetadata()
            stored[MetadataIndex(name)] = _StorageInfo(entry.file, entry.at, entry.size_bytes)
        paths = {name: torch_path(path) for name, path in self._paths.items()}
        return pickle.dumps(
            Metadata(state_dict_metadata=described, planner_data=paths, storage_data=stored)
        )

    def _add(self, structure: Structure) -> None:
        for item in (*structure.tensors, *structure.values):
            self._paths[item.name] = item.path
        for item, extent in zip(structure.tensors, structure.layout.extents, strict=True):
            entry = self.tensors.setdefault(
                item.name, TensorEntry(_listed(item.path), item.dtype, list(item.shape), [])
            )
            entry.shards.append(
                Shard(list(item.offsets), list(item.sizes), extent.file, extent.data_at)
            )
            described = self._described.setdefault(
                item.name,
                TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, item.dtype)), torch.Size(item.shape), []
                ),
            )
            index = MetadataIndex(item.name, item.offsets, len(described.chunks))
            described.chunks.append(
                ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes))
            )
            self._stored[index] = _StorageInfo(extent.file, extent.stream_at, extent.stream_bytes)


def _listed(path: tuple[Any, ...]) -> list[Any]:
    return [list(key) if isinstance(key, tuple) else key for key in path]
