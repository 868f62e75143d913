"""Storage that fails: slow, full, torn, or silently wrong; for tests of what relies on it.

    storage = FaultyStorage(tmp_path, Full(capacity_bytes=1000), Slow(seconds_per_write=0.1))
    with storage.open("weights", "wb") as file:
        file.write(b"...")              # OSError ENOSPC once 1000 bytes are written

Faults are met in the order in which they are given. Files are real ones in a real folder, so that
what was written can be looked at by other means. `flip_byte` and `truncate` damage a file that is
already there.
"""

from __future__ import annotations

import errno
import fnmatch
import io
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

__all__ = [
    "FaultyStorage",
    "Flipped",
    "Full",
    "Slow",
    "StorageFault",
    "Torn",
    "Write",
    "flip_byte",
    "truncate",
]


@dataclass(frozen=True)
class Write:
    """A write to a file: its name, where it begins, what it writes."""

    name: str
    offset: int
    data: bytes
    error: OSError | None = None
    """What the write raises after `data` has been written."""


class StorageFault(Protocol):
    """Changes writes."""

    def __call__(self, write: Write) -> Write:
        """The write as it really happens."""
        ...


@dataclass(frozen=True, kw_only=True)
class Slow:
    """Every write to a file that matches takes longer."""

    seconds_per_write: float
    files: str = "*"
    sleep: Callable[[float], None] = time.sleep

    def __call__(self, write: Write) -> Write:
        if fnmatch.fnmatch(write.name, self.files):
            self.sleep(self.seconds_per_write)
        return write


@dataclass(kw_only=True)
class Full:
    """There is room for `capacity_bytes` in all; what fits is written, then comes ENOSPC."""

    capacity_bytes: int
    used_bytes: int = field(default=0, init=False)

    def __call__(self, write: Write) -> Write:
        room = self.capacity_bytes - self.used_bytes
        self.used_bytes += min(room, len(write.data))
        if len(write.data) <= room:
            return write
        return _cut(write, room, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), write.name))


@dataclass(frozen=True, kw_only=True)
class Torn:
    """A file that matches gets `at_byte` bytes, and no more.

    The write that would go further fails with EIO; or, with `silently`, it and all later ones
    seem to succeed, as they do where a machine dies before its cache is on the disk.
    """

    at_byte: int
    files: str = "*"
    silently: bool = False

    def __call__(self, write: Write) -> Write:
        room = max(0, self.at_byte - write.offset)
        if len(write.data) <= room or not fnmatch.fnmatch(write.name, self.files):
            return write
        error = OSError(errno.EIO, os.strerror(errno.EIO), write.name)
        return _cut(write, room, None if self.silently else error)


@dataclass(frozen=True, kw_only=True)
class Flipped:
    """The byte at `offset` of a file that matches is written wrong, and nobody says so."""

    offset: int
    files: str = "*"

    def __call__(self, write: Write) -> Write:
        index = self.offset - write.offset
        if not 0 <= index < len(write.data) or not fnmatch.fnmatch(write.name, self.files):
            return write
        data = bytearray(write.data)
        data[index] ^= 0xFF
        return Write(write.name, write.offset, bytes(data), write.error)


class FaultyStorage:
    """The files of a folder, as faults let them be written.

    Args:
        root: the folder, which exists.
        faults: what every write goes through, in this order.
    """

    def __init__(self, root: str | os.PathLike[str], *faults: StorageFault) -> None:
        self.root = Path(root)
        self._faults = faults

    def open(self, name: str, mode: str = "rb") -> BinaryIO:
        """Opens a file: `rb` to read, `wb` to write it anew, `ab` to append."""
        if mode not in ("rb", "wb", "ab"):
            raise ValueError(f"mode is {mode!r}; allowed are 'rb', 'wb', 'ab'")
        if mode == "rb":
            return (self.root / name).open("rb")
        # A raw file would be a RawIOBase, of which no write need be whole.
        return cast(BinaryIO, _FaultyFile(self.root / name, name, mode, self._faults))

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.root / name).exists()

    def replace(self, source: str, target: str) -> None:
        """Renames a file over another."""
        (self.root / source).replace(self.root / target)

    def remove(self, name: str) -> None:
        """Removes a file."""
        (self.root / name).unlink()

    def names(self) -> list[str]:
        """The files, as paths from the root."""
        files = (path for path in self.root.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.root)) for path in files)


class _FaultyFile(io.BufferedIOBase):
    def __init__(self, path: Path, name: str, mode: str, faults: tuple[StorageFault, ...]) -> None:
        self._file = path.open(mode, buffering=0)
        self._name = name
        self._faults = faults
        self._offset = path.stat().st_size  # as its writer believes, whatever was written

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def tell(self) -> int:
        return self._offset

    def write(self, data: Any) -> int:
        whole = bytes(data)
        write = Write(self._name, self._offset, whole)
        for fault in self._faults:
            write = fault(write)
            if write.error is not None:
                break  # the rest of the storage never sees what was cut off
        view = memoryview(write.data)
        while view:
            view = view[self._file.write(view) :]
        if write.error is not None:
            self._offset += len(write.data)
            raise write.error
        self._offset += len(whole)
        return len(whole)

    def close(self) -> None:
        self._file.close()
        super().close()


def flip_byte(path: str | os.PathLike[str], offset: int) -> None:
    """Inverts the byte at `offset` of a file; from its end, if negative."""
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)
        if not byte:
            raise ValueError(f"{os.fspath(path)} has no byte at offset {offset}")
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))


def truncate(path: str | os.PathLike[str], size: int) -> None:
    """Cuts a file down to `size` bytes."""
    old = os.stat(path).st_size
    if not 0 <= size <= old:
        raise ValueError(f"{os.fspath(path)} has {old} bytes: cannot be cut down to {size}")
    os.truncate(path, size)


def _cut(write: Write, length: int, error: OSError | None) -> Write:
    return Write(write.name, write.offset, write.data[:length], error)
