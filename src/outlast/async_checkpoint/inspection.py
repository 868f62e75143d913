"""The checkpoints in a folder, for code that is not part of the job which saves them.

Lists, verifies, compares, deletes and reads them, without the lock of the folder; fault injection
runs the writer process with another storage (`run_writer`). Nothing here imports torch.
"""

from __future__ import annotations

import io
import math
import os
from typing import Any, BinaryIO, cast

from outlast.async_checkpoint.restore.verified_read import Piece, address_of, read_verified
from outlast.async_checkpoint.restore.verified_read import Source as Source
from outlast.async_checkpoint.restore.verified_read import storage_source as storage_source
from outlast.async_checkpoint.storage.directory import Found as Found
from outlast.async_checkpoint.storage.directory import candidates as candidates
from outlast.async_checkpoint.storage.directory import delete as delete
from outlast.async_checkpoint.storage.directory import open_storage as open_storage
from outlast.async_checkpoint.storage.directory import read_manifest
from outlast.async_checkpoint.storage.directory import survey as survey
from outlast.async_checkpoint.storage.directory import verify as verify
from outlast.async_checkpoint.storage.directory import verify_folder as verify_folder
from outlast.async_checkpoint.storage.local import LocalStorage as LocalStorage
from outlast.async_checkpoint.storage.manifest import MANIFEST as MANIFEST
from outlast.async_checkpoint.storage.manifest import checksum as checksum
from outlast.async_checkpoint.storage.manifest import saved_by as saved_by
from outlast.async_checkpoint.storage.protocol import FileWriter as FileWriter
from outlast.async_checkpoint.storage.protocol import Storage as Storage
from outlast.async_checkpoint.writer.main import main

run_writer = main


class VerifiedBytes(io.RawIOBase):
    """Bytes of a checkpoint, as a file. Each read verifies, and raises as `read_verified`."""

    def __init__(self, source: Source, file: str, at: int, size_bytes: int) -> None:
        super().__init__()
        self._source, self._file = source, file
        self._begin, self._size_bytes = at, size_bytes
        self._position = 0
        self._chunk = memoryview(bytearray(min(size_bytes, source.chunk_bytes)))
        self._held = range(0)  # the positions of what is in the chunk

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}
        self._position = max(0, start[whence] + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if self._position >= self._size_bytes or not view:
            return 0
        if self._position not in self._held:
            self._read()
        found = self._chunk[self._position - self._held.start :][: len(view)]
        found = found[: self._held.stop - self._position]
        view[: len(found)] = found
        self._position += len(found)
        return len(found)

    def _read(self) -> None:
        """Reads the part of the file's chunk, at the position, that belongs to these bytes."""
        length = self._source.chunk_bytes
        first = (self._begin + self._position) // length * length - self._begin
        self._held = range(0)
        wanted = range(max(first, 0), min(first + length, self._size_bytes))
        address = address_of(self._chunk)
        piece = Piece(self._file, self._begin + wanted.start, len(wanted), address, self._chunk)
        read_verified(self._source, [piece], threads=1)
        self._held = wanted


def open_bytes(storage: Storage, folder: str) -> dict[str, BinaryIO]:
    """Opens the tensors of bytes, each of one part, by name. Raises as `read_manifest`."""
    manifest = read_manifest(storage, folder)
    found: dict[str, tuple[str, int, int]] = {}
    for name, tensor in manifest.tensors.items():
        for shard in tensor.shards:
            found[name] = (shard.file, shard.at, math.prod(shard.sizes))
    source = storage_source(storage, folder, manifest)
    return {
        name: cast(BinaryIO, io.BufferedReader(VerifiedBytes(source, *place)))
        for name, place in found.items()
    }


def tensor_checksums(storage: Storage, folder: str) -> dict[str, str]:
    """The type, shape and checksum of each tensor, by its flat name, to compare checkpoints of two
    runs. Those of the manifest are of files: another number of ranks, or another distribution of
    the tensors over them, changes them. Raises as `verify_folder`.
    """
    from outlast.async_checkpoint.restore.whole_tensors import batches, read_tensors

    source = storage_source(storage, folder, verify_folder(storage, folder))
    found = {}
    for batch in batches(source, source.contents.tensors):
        for name, values in read_tensors(source, batch).items():
            tensor = source.contents.tensors[name]
            found[name] = f"{tensor.dtype}{tensor.shape} {checksum(values.tobytes())}"
    return {name: found[name] for name in source.contents.tensors}
