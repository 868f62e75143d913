"""Makes files durable, and locks them; private folders."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from outlast.system.processes import is_dying

_FLOCK = "hhlli0l"  # struct flock: type, whence, start, length, pid
_DYING_S = 60.0
_ELSEWHERE_S = 5.0
_POLL_S = 0.01
_pause = time.sleep


class FileLocked(Exception):
    """Another process has locked the file; the message is what that process wrote into it."""


def read_fully(descriptor: int, offset: int, buffer: memoryview) -> int:
    """Fills `buffer` from `offset`; returns how many bytes there were."""
    done = 0
    while done < len(buffer) and (count := os.preadv(descriptor, [buffer[done:]], offset + done)):
        done += count
    return done


def fsync_folder(path: str | os.PathLike[str]) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Creates a folder, which may exist, and those above it; their names are durable."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        fsync_folder(made.parent)


def private_folder(path: Path) -> Path:
    """Creates a folder for this user alone. A `PermissionError` if there is one of another user, an
    open one, or a link.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} is not a private folder of this user (chmod 700)")
    return path


def replace_durably(path: Path, content: bytes) -> None:
    """Writes a small file in one step, durable at the return. From one process at a time."""
    with replacing(path, path.with_name(f"{path.name}.draft")) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path, draft: Path) -> Iterator[BinaryIO]:
    """A new file, `draft`, that takes the place of `path` after the block, durably; or goes."""
    try:
        with open(draft, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def lock_file(
    path: str | os.PathLike[str],
    owner: str,
    *,
    replaces: Callable[[str], bool] = lambda holder: False,
) -> int:
    """Locks a file for this process, and writes `owner` into it for the `FileLocked` that it raises
    in other processes. It is created if missing; the umask says who else may write it.

    The lock (`fcntl`) ends with this process, however that ends; it works over NFS, and a forked
    child does not hold it. It also ends with the descriptor that is returned, or another one.

    A killed process gives back its memory before its locks, which takes about 100 ms per GiB, and
    its peers know of its death before that. So the lock of a process that is dying is waited for:
    60 seconds at most, because a write to a disk that hangs may delay its end. Of a process on
    another host or in another container it cannot be known whether it is dying: 5 seconds at most.

    If `replaces` says of what the holder has written that this process takes its place, the file is
    replaced by a new one, which this process has locked: a holder that cannot release its lock, on
    a host that is lost or as a stopped process, keeps that of a file without a name.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o666)
    began = time.monotonic()
    try:
        while not (_lock_now(descriptor) and is_at(descriptor, path)):
            if not is_at(descriptor, path):  # replaced since it was opened
                os.close(descriptor)
                descriptor = os.open(path, flags, 0o666)
                continue
            if replaces(os.pread(descriptor, 1000, 0).decode(errors="replace").strip()):
                os.close(descriptor)
                return _replace_locked(path, owner)
            if time.monotonic() - began > _patience(descriptor):
                holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
                raise FileLocked(holder)
            _pause(_POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner.encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def lock_open_file(descriptor: int) -> bool:
    """Locks an open file as `lock_file` does, waiting for a dying holder; whether it did."""
    began = time.monotonic()
    while not _lock_now(descriptor):
        if time.monotonic() - began > _patience(descriptor):
            return False
        _pause(_POLL_S)
    return True


def _replace_locked(path: str | os.PathLike[str], owner: str) -> int:
    """Puts a new, locked file in the place of another."""
    name = f"{os.fspath(path)}.{os.getpid()}"
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        os.pwrite(descriptor, owner.encode(), 0)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(name, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_at(descriptor: int, path: str | os.PathLike[str]) -> bool:
    """Whether an open file still has this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _lock_now(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return False
    return True


def _patience(descriptor: int) -> float:
    """How long the present holder of the lock is waited for, in seconds."""
    request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, request))
    if kind == fcntl.F_UNLCK:
        return _DYING_S  # released just now
    if pid <= 0:  # on another host, or in another container
        return _ELSEWHERE_S
    return _DYING_S if is_dying(pid) else 0.0
