"""A checkpoint in the making: a working folder that becomes a checkpoint in one step, or nothing.

In order: the files, each durable; the manifest; the folder; the rename to its final name; and only
then the checkpoints before it are removed. A process that is killed on the way leaves a working
folder, which the next save removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.async_checkpoint.storage.manifest import (
    CHUNK_BYTES,
    MANIFEST,
    FileEntry,
    Manifest,
    checksum,
    encode,
    pieces,
)
from outlast.elastic.states import stored
from outlast.elastic.states.file_names import file_name
from outlast.errors import CheckpointError
from outlast.system.error_text import describe

__all__ = ["Draft", "write_state"]

log = logging.getLogger("outlast.elastic")

_LOCK = ".states.lock"

Write = Callable[[BinaryIO], object]


class Draft:
    """The next checkpoint in a folder, in a block. What is not committed in the block is removed.

    Args:
        path: of the folder of checkpoints; it is made.
        world_size: of the job.

    Raises:
        CheckpointError: if another process is saving there; names it.
        OSError: if the folder cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str], world_size: int) -> None:
        self.storage = LocalStorage(os.fspath(path))
        self._world_size = world_size
        self._files: dict[str, FileEntry] = {}
        self._save_id = f"states-{uuid.uuid4().hex[:16]}"
        self.storage.prepare()
        self._lock = _lock(self.storage.root / _LOCK)
        try:
            for folder in stored.leftovers(self.storage):
                log.info("removing %s, which a save that did not end has left", folder)
                _remove(self.storage, folder)
            self.number = stored.newest(self.storage) + 1
            self._working = stored.working_of(self.number, self._save_id.removeprefix("states-"))
            self.storage.make(self._working)
        except BaseException:
            os.close(self._lock)
            raise
        self._committed = False

    @property
    def path(self) -> Path:
        """Of the working folder."""
        return self.storage.root / self._working

    def add(self, name: str, write: Write) -> None:
        """Adds a state.

        Raises:
            CheckpointError: naming the state, if `write` raised.
        """
        entry = write_state(self.path, name, write)
        self._files[entry.name] = entry

    def commit(self) -> str:
        """Makes it the newest checkpoint, and removes those before it; returns its path."""
        manifest = Manifest(
            step=self.number,
            save_id=self._save_id,
            world_size=self._world_size,
            metric=None,
            chunk_bytes=CHUNK_BYTES,
            files=self._files,
            tensors={},
            values={},
        )
        final = stored.folder_of(self.number)
        self.storage.put(self._working, MANIFEST, encode(manifest))
        self.storage.sync(self._working)
        self.storage.publish(self._working, final)
        self._committed = True
        for folder in stored.replaced(self.storage, self.number):
            _remove(self.storage, folder)
        return str(self.storage.root / final)

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if not self._committed:
                _remove(self.storage, self._working)
        finally:
            os.close(self._lock)


def write_state(folder: Path, name: str, write: Write) -> FileEntry:
    """Writes a state into its file in `folder`; returns when the file is durable.

    Args:
        folder: is there.
        name: of the state.
        write: is given the file; it may leave it anywhere, or closed.

    Raises:
        CheckpointError: naming the state, if `write` raised.
        OSError: if the file cannot be written.
    """
    path = folder / file_name(name)
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o644)
    try:
        with open(os.dup(descriptor), "w+b") as file:
            try:
                write(file)
            except Exception as e:
                raise CheckpointError(
                    f"the state {name!r} could not be saved: {describe(e)}"
                ) from e
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


def _remove(storage: LocalStorage, folder: str) -> None:
    """If that fails, the checkpoint is committed all the same, and the next save tries again."""
    try:
        storage.remove(folder)
    except OSError as e:
        log.warning("%s/%s could not be removed: %s", storage.where, folder, e)


def _lock(path: Path) -> int:
    """A lock of this process (`fcntl`), which ends with it, and with the descriptor returned."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise CheckpointError(
            f"{path.parent} is in use: {holder or 'another process'} is saving there; two jobs "
            "that save into one folder would remove each other's checkpoints"
        ) from None
    except BaseException:
        os.close(descriptor)
        raise
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor
