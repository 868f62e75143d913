"""Damages existing files, for tests of what a program does with a damaged checkpoint."""

from __future__ import annotations

import os


def flip_byte(path: str | os.PathLike[str], offset: int) -> None:
    """Inverts the byte at `offset` of a file; a negative offset counts from the end."""
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)
        if not byte:
            raise ValueError(f"{os.fspath(path)} has no byte at offset {offset}")
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))


def truncate(path: str | os.PathLike[str], size: int) -> None:
    """Truncates a file to `size` bytes."""
    old = os.stat(path).st_size
    if not 0 <= size <= old:
        raise ValueError(f"{os.fspath(path)} has {old} bytes: cannot be truncated to {size}")
    os.truncate(path, size)
