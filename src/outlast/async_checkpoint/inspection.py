"""The checkpoints in a folder, for code that is not part of the job which saves them.

Lists, verifies, compares, deletes and reads them, without the lock of the folder; fault injection
runs the writer process with another storage (`run_writer`). Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection
from typing import Any

from outlast.async_checkpoint.restore.verified_read import (
    Piece,
    check_sizes,
    read_verified,
    storage_source,
)
from outlast.async_checkpoint.storage.directory import (
    Found,
    candidates,
    delete,
    open_storage,
    read_manifest,
    survey,
    verify,
    verify_folder,
)
from outlast.async_checkpoint.storage.entries import ITEM_BYTES, TensorEntry
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.async_checkpoint.storage.manifest import MANIFEST, checksum, read_hashed
from outlast.async_checkpoint.storage.protocol import FileWriter, Storage
from outlast.async_checkpoint.writer.main import main as run_writer
from outlast.errors import CheckpointError

__all__ = [
    "MANIFEST",
    "FileWriter",
    "Found",
    "LocalStorage",
    "Storage",
    "candidates",
    "checksum",
    "delete",
    "open_storage",
    "read_bytes",
    "run_writer",
    "survey",
    "tensor_checksums",
    "verify",
]


def read_bytes(
    storage: Storage,
    folder: str,
    allocate: Callable[[str, int], tuple[int, Any]],
    names: Collection[str] | None = None,
) -> None:
    """Reads tensors of bytes, each of one part, and verifies every byte.

    Args:
        storage: the folder of checkpoints.
        folder: the name of the checkpoint's directory.
        allocate: returns the address of memory for the tensor of this name and size, and its owner.
        names: of the tensors; those that the checkpoint lacks are ignored. All by default.

    Raises:
        CheckpointError: if something is missing or not what was written; names the file.
        CheckpointReadError: if it cannot be read now.
    """
    manifest = read_manifest(storage, folder)
    found: dict[str, tuple[str, int, int]] = {}
    for name, tensor in manifest.tensors.items():
        for shard in tensor.shards:
            found[name] = (shard.file, shard.at, math.prod(shard.sizes))
    if not found:  # the first format of `outlast.elastic`: each state is a file
        found = {name: (name, 0, file.size_bytes) for name, file in manifest.files.items()}
    if names is not None:
        found = {name: place for name, place in found.items() if name in names}
    source = storage_source(storage, folder, manifest)
    check_sizes(source, {file for file, _, _ in found.values()})  # before memory is allocated
    pieces = [
        Piece(file, at, size, *allocate(name, size)) for name, (file, at, size) in found.items()
    ]
    read_verified(source, pieces)


def tensor_checksums(storage: Storage, folder: str) -> dict[str, str]:
    """The type, shape and checksum of each tensor, by its flat name, to compare checkpoints of two
    runs. Those of the manifest are of files: another number of ranks, or another distribution of
    the tensors over them, changes them. One tensor at a time is in memory.

    Raises:
        CheckpointError: if a file is missing, or is not what was saved: see `verify_folder`.
    """
    manifest = verify_folder(storage, folder)
    return {name: _described(storage, folder, one) for name, one in manifest.tensors.items()}


def _described(storage: Storage, folder: str, tensor: TensorEntry) -> str:
    import numpy as np  # takes a tenth of a second

    item_bytes = ITEM_BYTES[tensor.dtype]
    values = np.empty(tensor.shape, f"V{item_bytes}")
    for shard in tensor.shards:
        content = bytearray(math.prod(shard.sizes) * item_bytes)
        with contextlib.closing(storage.open(folder, shard.file)) as reader:
            got, _ = read_hashed(reader, shard.at, memoryview(content))
        if got != len(content):
            raise CheckpointError(f"{storage.where}/{folder}/{shard.file} has been truncated")
        ends = (begin + size for begin, size in zip(shard.offsets, shard.sizes, strict=True))
        part = tuple(map(slice, shard.offsets, ends))
        values[part] = np.frombuffer(content, values.dtype).reshape(shard.sizes)
    return f"{tensor.dtype}{tensor.shape} {checksum(values.tobytes())}"
