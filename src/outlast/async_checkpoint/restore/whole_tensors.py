"""Reads whole tensors, assembled from the parts of all ranks, without torch and without ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from outlast.async_checkpoint.restore.verified_read import (
    Piece,
    Source,
    address_of,
    check_sizes,
    read_verified,
)
from outlast.async_checkpoint.storage.entries import ITEM_BYTES

_BATCH_BYTES = 256 << 20


def batches(source: Source, names: Iterable[str]) -> Iterator[list[str]]:
    """Groups tensors to read together: small ones share the chunks that have the checksums. A batch
    has at most 256 MiB, or one tensor. In the order in which they are in the files.
    """
    tensors = source.contents.tensors

    def place(name: str) -> tuple[str, int]:
        shards = tensors[name].shards
        return (shards[0].file, shards[0].at) if shards else ("", 0)

    batch: list[str] = []
    size_bytes = 0
    for name in sorted(names, key=place):
        if batch and size_bytes + tensors[name].size_bytes > _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(name)
        size_bytes += tensors[name].size_bytes
    if batch:
        yield batch


def read_tensors(source: Source, names: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Tensors by name, as raw elements; takes twice their size. Raises as `read_verified`."""
    tensors = {name: source.contents.tensors[name] for name in names}
    check_sizes(source, {shard.file for each in tensors.values() for shard in each.shards})
    found: dict[str, np.ndarray[Any, Any]] = {}
    pieces: list[Piece] = []
    copies: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
    for name, tensor in tensors.items():
        found[name] = np.empty(tensor.shape, f"V{ITEM_BYTES[tensor.dtype]}")
        for shard in tensor.shards:
            ends = (begin + size for begin, size in zip(shard.offsets, shard.sizes, strict=True))
            index: tuple[Any, ...] = (*map(slice, shard.offsets, ends), ...)
            part = found[name][index]
            into = part if part.flags.c_contiguous else np.empty(part.shape, part.dtype)
            pieces.append(Piece(shard.file, shard.at, into.nbytes, into.ctypes.data, into))
            if into is not part:
                copies.append((part, into))
    read_verified(source, pieces)
    for part, into in copies:
        part[...] = into
    return found


def read_value(source: Source, name: str) -> bytes:
    """A value, as `torch.save` wrote it. Raises as `read_tensors`."""
    entry = source.contents.values[name]
    check_sizes(source, [entry.file])
    content = memoryview(bytearray(entry.size_bytes))
    if content:
        address = address_of(content)
        read_verified(source, [Piece(entry.file, entry.at, len(content), address, content)])
    return bytes(content)
