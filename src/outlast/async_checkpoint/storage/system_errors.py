"""What the errors of the system mean: damage or a read error, when a checkpoint is read; a folder
in which no checkpoint can be saved.

A missing file is damage: the checkpoint cannot be restored, an older one can. An error of the disk,
the network or the process (EIO, ESTALE, EMFILE, EACCES, a timeout, an answer 503) says nothing
about the checkpoint. It may pass, so the read is tried again; if it stays, the restore fails. To
pass over the checkpoint would be to continue from an older step, and overwrite an intact one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from outlast.async_checkpoint.storage.protocol import FileReader
from outlast.errors import CheckpointError, CheckpointReadError, FolderUnusable

T = TypeVar("T")

# What the system says of a path at which there is no regular file.
_DAMAGE = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,  # a link, where none is followed
    errno.ENXIO,  # a socket, or a device that is not there
    errno.ENODEV,
}
_DAMAGES = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # from fsspec, without number
# Long enough for another thread to close its files, or a server to change over.
_PAUSES_S = (0.05, 0.25, 1.0)
_pause = time.sleep

NO_ROOM = "Make room in"
"""In the message of a full disk."""
_OWNER = "Give this user ({user}) write access to it"
_FILE = "{file} is a file: remove it"
_REMEDIES = {
    errno.EACCES: _OWNER,
    errno.EPERM: _OWNER,
    errno.EROFS: "Mount its file system for writing",
    errno.ENOTDIR: _FILE,
    errno.EEXIST: _FILE,
    errno.ENOENT: "Create it, or mount its file system",
    errno.ENAMETOOLONG: "Use shorter names",
    errno.ELOOP: "Mend the symbolic links in its path",
}
"""By the error. No other one is permanent: a full disk or an I/O error may pass."""


def reading(where: str, read: Callable[[], T]) -> T:
    """Calls `read`, again after a read error; errors name `where`. A `CheckpointError` if a file is
    missing, or is not a regular file. A `CheckpointReadError` if it still cannot be read.
    """
    for pause_s in (*_PAUSES_S, None):
        try:
            return read()
        except OSError as e:
            cause = (e.strerror or str(e)).removeprefix(f"{where}: ")
            if e.errno in _DAMAGE or isinstance(e, _DAMAGES):
                raise CheckpointError(f"{where}: {cause}") from e
            if pause_s is None:
                name = errno.errorcode.get(e.errno or 0, type(e).__name__)
                raise CheckpointReadError(
                    f"{where} cannot be read on {socket.gethostname()}: {cause} ({name}, "
                    f"{len(_PAUSES_S) + 1} times). This is not damage, so it is not passed over"
                ) from e
            _pause(pause_s)
    raise AssertionError("unreachable")


class Reopened:
    """A file for several threads, opened again after a read error. Raises as `reading`."""

    def __init__(self, where: str, open_file: Callable[[], FileReader]) -> None:
        self._where = where
        self._open = open_file
        self._readers = [reading(where, open_file)]

    @property
    def newest(self) -> FileReader:
        return self._readers[-1]

    def read(self, work: Callable[[FileReader], T]) -> T:
        """Calls `work` with the open file. Raises as `reading`."""

        def attempt() -> T:
            reader = self.newest
            try:
                return work(reader)
            except OSError:
                # Other threads may still use the old one: it is closed with the new one.
                self._readers.append(self._open())
                raise

        return reading(self._where, attempt)

    def __enter__(self) -> Reopened:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.close()


@contextlib.contextmanager
def preparing(folder: Path) -> Iterator[None]:
    """A block that creates `folder` or files in it; a `FolderUnusable` names the remedy."""
    try:
        yield
    except OSError as e:
        remedy = _REMEDIES.get(e.errno or 0)
        if remedy is None:
            raise
        file = next((each for each in (*reversed(folder.parents), folder) if each.is_file()), "")
        remedy = remedy.format(user=f"uid {os.geteuid()}", file=file)
        at = "" if e.filename in (None, str(folder)) else f" at {e.filename}"
        raise FolderUnusable(
            f"checkpoints cannot be saved in {folder} on {socket.gethostname()}: {e.strerror}{at}. "
            f"{remedy}, or use another folder"
        ) from e


def room_advice(error: BaseException, where: str) -> str:
    """A sentence to append to the message of a full disk; empty for another error."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f". {NO_ROOM} {where}"
    return ""


def check_writable(folder: Path) -> None:
    """Raises the `OSError` of a folder in which this process cannot create files."""
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        number = errno.EROFS if read_only else errno.EACCES
        raise OSError(number, os.strerror(number), str(folder))
