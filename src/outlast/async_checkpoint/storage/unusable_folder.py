"""What the system says of a folder in which no checkpoint can be saved, and what to do about it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from outlast.errors import FolderUnusable

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


@contextlib.contextmanager
def preparing(folder: Path) -> Iterator[None]:
    """A block that creates `folder`, or files in it.

    Raises:
        FolderUnusable: if the system does not allow it; names the folder, the cause and a remedy.
    """
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
        return f". Make room in {where}, or use another folder"
    return ""


def check_writable(folder: Path) -> None:
    """Raises the `OSError` of a folder in which this process cannot create files."""
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        number = errno.EROFS if read_only else errno.EACCES
        raise OSError(number, os.strerror(number), str(folder))
