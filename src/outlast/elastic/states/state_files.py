"""The file of a state: its name, and its copy in memory until a background save writes it."""

from __future__ import annotations

import os
import urllib.parse
import weakref
from collections.abc import Callable
from typing import BinaryIO

from outlast.async_checkpoint.named_files import checksum
from outlast.errors import CheckpointError
from outlast.system.error_text import describe

Write = Callable[[BinaryIO], object]

_SUFFIX = ".state"
_LONGEST = 200  # file systems allow 255 bytes
_KEPT = 100
_EMPTY = "%"  # no quoted name is equal to this


def file_name(name: str) -> str:
    """The name of the file of the state `name`, which may be any text.

    Letters, digits and `_.-~` stand for themselves, and every other byte of the UTF-8 is written
    `%XX`: so no two states share a file, and no file is outside the folder. A name that is too
    long for a file system is cut and gets a checksum of the whole name after a `+`, which no
    quoted name contains.
    """
    data = name.encode("utf-8", "surrogatepass")
    quoted = urllib.parse.quote(data, safe="")
    if len(quoted) > _LONGEST:
        quoted = f"{quoted[:_KEPT]}+{checksum(data)}"
    return (quoted or _EMPTY) + _SUFFIX


def checked(name: str, write: Write) -> Write:
    """Same as `write`, but an exception becomes a `CheckpointError` that names the state."""

    def checked_write(file: BinaryIO) -> None:
        try:
            write(file)
        except Exception as e:
            raise CheckpointError(f"the state {name!r} could not be saved: {describe(e)}") from e

    return checked_write


class StateCopy:
    """A saved state in an in-memory file, until a background save writes it to disk. Filling such a
    file costs less than filling a growing buffer.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("outlast-state", os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._descriptor)

    def fill(self, write: Write) -> None:
        """Saves the state into memory."""
        with open(os.dup(self._descriptor), "w+b") as file:
            write(file)

    def write(self, file: BinaryIO) -> None:
        """Writes the copy to a file on disk, once, and frees the memory."""
        size, at = os.fstat(self._descriptor).st_size, 0
        file.flush()
        while at < size:
            at += os.sendfile(file.fileno(), self._descriptor, at, size - at)
        self.close()
