"""The checksum of each tensor of a checkpoint, to compare checkpoints of two runs.

Those of the manifest are of files: another number of ranks, or another distribution of the tensors
over them, changes them. These are of the values alone. Does not import torch.
"""

from __future__ import annotations

import math
from contextlib import closing

import numpy as np

from outlast.async_checkpoint.storage.directory import verify_folder
from outlast.async_checkpoint.storage.entries import ITEM_BYTES, TensorEntry
from outlast.async_checkpoint.storage.manifest import checksum, read_hashed
from outlast.async_checkpoint.storage.protocol import Storage
from outlast.errors import CheckpointError

__all__ = ["tensor_checksums"]


def tensor_checksums(storage: Storage, folder: str) -> dict[str, str]:
    """The type, shape and checksum of each tensor, by its flat name. One tensor at a time is in
    memory.

    Raises:
        CheckpointError: if a file is missing, or is not what was saved: see `verify_folder`.
    """
    manifest = verify_folder(storage, folder)
    return {name: _described(storage, folder, one) for name, one in manifest.tensors.items()}


def _described(storage: Storage, folder: str, tensor: TensorEntry) -> str:
    item_bytes = ITEM_BYTES[tensor.dtype]
    values = np.empty(tensor.shape, f"V{item_bytes}")
    for shard in tensor.shards:
        content = bytearray(math.prod(shard.sizes) * item_bytes)
        with closing(storage.open(folder, shard.file)) as reader:
            got, _ = read_hashed(reader, shard.at, memoryview(content))
        if got != len(content):
            raise CheckpointError(f"{storage.where}/{folder}/{shard.file} has been truncated")
        ends = (begin + size for begin, size in zip(shard.offsets, shard.sizes, strict=True))
        part = tuple(map(slice, shard.offsets, ends))
        values[part] = np.frombuffer(content, values.dtype).reshape(shard.sizes)
    return f"{tensor.dtype}{tensor.shape} {checksum(values.tobytes())}"
