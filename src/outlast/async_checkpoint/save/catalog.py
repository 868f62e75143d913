"""The contents of a checkpoint across all ranks: its manifest, its metadata for plain PyTorch."""

from __future__ import annotations

import json
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
from outlast.async_checkpoint.storage.entries import FileEntry, Shard, TensorEntry, ValueEntry
from outlast.async_checkpoint.storage.manifest import CHUNK_BYTES, Manifest, checksum, pieces
from outlast.errors import CheckpointError

METADATA = ".metadata"


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

    def manifest(
        self, records: Sequence[bytes], step: int, save_id: str, metric: float | None
    ) -> tuple[Manifest, bytes]:
        """The manifest of a checkpoint, and the content of its file `METADATA`; `records` are what
        the ranks have reported (`Save.write`).

        Raises:
            CheckpointError: if a rank has written into another folder, or another structure.
        """
        files: dict[str, FileEntry] = {}
        values: dict[str, ValueEntry] = {}
        judged: list[list[str]] = []
        for rank, record in enumerate(map(json.loads, records)):
            structure = self.structures[rank]
            if record["id"] != save_id:
                raise CheckpointError(f"rank {rank} wrote into another folder: {record['id']}")
            if record["structure"] != structure.digest:
                raise CheckpointError(f"rank {rank} has saved another structure than was agreed")
            for item, (at, size) in zip(structure.values, record["places"], strict=True):
                values[item.name] = ValueEntry(_listed(item.path), values_file(rank), at, size)
            if "non_finite" in record:
                judged.append(record["non_finite"])
            for name, entry in record["files"].items():
                files[name] = FileEntry(name, entry["size_bytes"], entry["checksums"])
        # It stays the same while the values have the same sizes.
        metadata = self._metadata.of(dict(values), lambda: self._pickle(values))
        checksums = [checksum(metadata[at : at + n]) for at, n in pieces(len(metadata))]
        files[METADATA] = FileEntry(METADATA, len(metadata), checksums)
        manifest = Manifest(
            step=step,
            save_id=save_id,
            world_size=len(records),
            metric=metric,
            chunk_bytes=CHUNK_BYTES,
            files=files,
            tensors=self.tensors,
            values=values,
            non_finite=sorted(set().union(*judged)) if judged else None,
        )
        return manifest, metadata

    def _pickle(self, values: Mapping[str, ValueEntry]) -> bytes:
        """The `.metadata` file of torch.distributed.checkpoint, for loading with plain PyTorch."""
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
