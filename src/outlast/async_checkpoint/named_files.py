"""The storage interface of this package for other packages.

Directories of checkpoints are listed, verified, compared and deleted; fault injection runs the
writer process with another storage (`run_writer`). Checkpoints of named files, in which
`outlast.elastic` keeps its states, are written and read, with the directories, manifest, checksums,
lock and commit of the checkpointer. A save writes, in order: the files, each durable; the manifest;
the entries of the working directory; the rename to the final name. Only then are older checkpoints
removed. A process that is killed before the rename leaves a working directory, which the next save
removes.

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from outlast.async_checkpoint.restore.verified_read import (
    Piece,
    address_of,
    read_verified,
    storage_source,
)
from outlast.async_checkpoint.storage.directory import (
    Found,
    candidates,
    delete,
    is_committed,
    leftovers,
    open_storage,
    read_manifest,
    size_error,
    survey,
    verify,
    verify_folder,
)
from outlast.async_checkpoint.storage.entries import ITEM_BYTES, FileEntry, TensorEntry
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.async_checkpoint.storage.manifest import (
    CHUNK_BYTES,
    FORMAT_VERSION,
    HEAD_BYTES,
    MANIFEST,
    Manifest,
    checksum,
    decode_head,
    encode,
    pieces,
    read_hashed,
    saved_by,
)
from outlast.async_checkpoint.storage.protocol import (
    STATES,
    STEP,
    FileWriter,
    Storage,
    read_bytes,
    step_of,
)
from outlast.async_checkpoint.writer.main import main as run_writer
from outlast.errors import CheckpointError, CheckpointMismatch, CheckpointReadError
from outlast.system.files import fsync_folder, make_folder

__all__ = [
    "MANIFEST",
    "STATES",
    "STEP",
    "FileCheckpoint",
    "FileWriter",
    "Found",
    "LocalStorage",
    "NewFileCheckpoint",
    "Storage",
    "candidates",
    "checksum",
    "delete",
    "is_committed",
    "new_checkpoint",
    "newest_valid",
    "open_storage",
    "replace_file",
    "run_writer",
    "survey",
    "tensor_checksums",
    "verify",
    "verify_folder",
]

log = logging.getLogger("outlast.checkpoint")


class FileCheckpoint:
    """A committed checkpoint, of which only the manifest has been read.

    Raises:
        CheckpointError: if the manifest is missing, damaged or of a later format.
    """

    def __init__(self, storage: LocalStorage, folder: str) -> None:
        self.where = f"{storage.where}/{folder}"
        self._storage = storage
        self._folder = folder
        self._manifest = read_manifest(storage, folder)

    def __contains__(self, name: str) -> bool:
        return name in self._manifest.files

    def read(self, name: str) -> io.BytesIO:
        """The contents of a file, with every byte verified.

        Raises:
            CheckpointError: if the file is missing or not what was written; names it.
        """
        entry = self._manifest.files[name]
        wrong = size_error(self._storage, self._folder, entry)
        if wrong:
            raise CheckpointError(f"{self.where} is damaged: {wrong}")
        source = storage_source(self._storage, self._folder, self._manifest)
        content = io.BytesIO(bytes(entry.size_bytes))
        if entry.size_bytes:
            with content.getbuffer() as view:
                piece = Piece(name, 0, entry.size_bytes, address_of(view), view)
                read_verified(source, [piece])
        return content


def newest_valid(storage: LocalStorage) -> str | None:
    """The directory of the newest checkpoint whose bytes are all valid; `None` if there is no
    checkpoint.

    Raises:
        CheckpointError: if none is valid (names what is wrong with each), or if one has a later
            format, or cannot be read now, which must not be skipped.
    """
    wrong = []
    for _, folder in candidates(storage):
        try:
            verify_folder(storage, folder)
        except (CheckpointMismatch, CheckpointReadError):
            raise  # it may be intact
        except CheckpointError as e:
            wrong.append(str(e))
            log.warning("passed over a checkpoint: %s", e)
        else:
            return folder
    if wrong:
        raise CheckpointError(
            f"no checkpoint in {storage.where} is valid:\n  " + "\n  ".join(wrong)
        )
    return None


class NewFileCheckpoint:
    """The next checkpoint, in a working directory of a locked storage. Made by `new_checkpoint`."""

    def __init__(self, storage: LocalStorage, world_size: int) -> None:
        self._storage = storage
        self._world_size = world_size
        self._files: dict[str, FileEntry] = {}
        self._save_id = uuid.uuid4().hex[:16]
        # Directories without a manifest count too: no two have the same number.
        steps = [step_of(folder, storage.prefix) or 0 for folder in storage.folders()]
        self._number = max(steps, default=0) + 1
        self.working, self.final = storage.names_for(self._number, self._save_id)
        self.committed = False
        storage.make(self.working)

    def add(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        """Writes a file; returns when it is durable. `write` receives the file, and may leave it
        closed or at any position.

        Raises:
            OSError: if the file cannot be written; and whatever `write` raises.
        """
        self._files[name] = _write_file(self._storage.root / self.working / name, write)

    def commit(self) -> str:
        """Makes it the newest checkpoint, and removes older ones; returns its path."""
        storage = self._storage
        manifest = Manifest(
            step=self._number,
            save_id=self._save_id,
            world_size=self._world_size,
            metric=None,
            chunk_bytes=CHUNK_BYTES,
            files=self._files,
            tensors={},
            values={},
        )
        storage.put(self.working, MANIFEST, encode(manifest))
        storage.sync(self.working)
        try:
            storage.publish(self.working, self.final)
        except OSError as e:
            if saved_by(storage, self.final) != self._save_id:
                raise
            raise CheckpointError(
                f"it is not known whether {storage.where}/{self.final} is committed: it is "
                f"visible, but may not be durable: {e}"
            ) from e
        self.committed = True
        for folder in _replaced_by(storage, self._number):
            _remove(storage, folder)
        return f"{storage.where}/{self.final}"


@contextlib.contextmanager
def new_checkpoint(storage: LocalStorage, world_size: int) -> Iterator[NewFileCheckpoint]:
    """A checkpoint to fill and commit in a `with` block. An uncommitted one is removed.

    Raises:
        CheckpointError: if another process saves there; names it.
        OSError: if the directory of checkpoints cannot be created.
    """
    storage.prepare()
    storage.lock(f"process {os.getpid()} on {socket.gethostname()}")
    try:
        for folder in leftovers(storage):
            log.info("removing %s, which an interrupted save has left", folder)
            _remove(storage, folder)
        new = NewFileCheckpoint(storage, world_size)
        try:
            yield new
        finally:
            if not new.committed:
                _remove(storage, new.working)
    finally:
        storage.unlock()


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file outside of any checkpoint, durably, and puts it in place in one step; its
    directory is created. `write` is as for `NewFileCheckpoint.add`.
    """
    folder = path.parent
    make_folder(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as working:
        written = Path(working) / path.name
        _write_file(written, write)
        os.replace(written, path)
    fsync_folder(folder)


def _write_file(path: Path, write: Callable[[BinaryIO], object]) -> FileEntry:
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o644)
    try:
        with open(os.dup(descriptor), "w+b") as file:
            write(file)
        os.fsync(descriptor)
        size = os.fstat(descriptor).st_size
        buffer = memoryview(bytearray(min(size, CHUNK_BYTES)))
        checksums = []
        for at, length in pieces(size):
            if os.preadv(descriptor, [buffer[:length]], at) != length:
                raise OSError(f"{path} changed while it was saved")
            checksums.append(checksum(buffer[:length]))
    finally:
        os.close(descriptor)
    return FileEntry(path.name, size, checksums)


def _replaced_by(storage: LocalStorage, number: int) -> list[str]:
    """The directories of the checkpoints that checkpoint `number` replaces. One with a manifest
    that this library cannot read is not replaced.
    """
    older = [folder for step, folder in candidates(storage) if step < number]
    return [folder for folder in older if 0 < _version(storage, folder) <= FORMAT_VERSION]


def _remove(storage: LocalStorage, folder: str) -> None:
    """Removes a directory. If that fails, the next save tries again; a commit stays valid."""
    try:
        storage.remove(folder)
    except OSError as e:
        log.warning("%s/%s could not be removed: %s", storage.where, folder, e)


def _version(storage: LocalStorage, folder: str) -> int:
    """The version of the format of a checkpoint; 0 if its manifest does not say."""
    try:
        with contextlib.closing(storage.open(folder, MANIFEST)) as reader:
            return decode_head(read_bytes(reader, 0, HEAD_BYTES), folder).version
    except CheckpointMismatch:
        return FORMAT_VERSION + 1
    except (OSError, CheckpointError):
        return 0


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
