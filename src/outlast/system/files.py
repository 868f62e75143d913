"""Makes files durable, and locks them."""

from __future__ import annotations

import errno
import fcntl
import os


class FileLocked(Exception):
    """Another process has locked the file; the message is what that process wrote into it."""


def fsync_folder(path: str | os.PathLike[str]) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(path: str | os.PathLike[str], owner: str) -> int:
    """Locks a file, which is created if missing, for this process, and writes `owner` into it for
    the `FileLocked` of other processes.

    The lock (`fcntl`) ends with this process, however that ends; it works over NFS, and a forked
    child does not hold it. It also ends when the descriptor that is returned, or any other
    descriptor of the file, is closed.

    Raises:
        FileLocked: if another process has locked it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner.encode(), 0)
    except OSError as e:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
        os.close(descriptor)
        if e.errno in (errno.EACCES, errno.EAGAIN):
            raise FileLocked(holder) from None
        raise
    return descriptor
