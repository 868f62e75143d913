"""Simulates failing storage for tests: slow, full, torn, or silently corrupted.

    storage = FaultyStorage(tmp_path, Full(capacity_bytes=1000), Slow(seconds_per_write=0.1))
    with storage.open("weights", "wb") as file:
        file.write(b"...")              # OSError ENOSPC once 1000 bytes are written

Each write passes through the faults in the given order. Files are real files in a real folder, so
that a test can read what was written. `flip_byte` and `truncate` damage an existing file.
"""

from __future__ import annotations

import errno
import fnmatch
import io
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from outlast.system.arguments import Duration, as_timedelta, seconds


@dataclass(frozen=True)
class Write:
    """A write to a file: the file's name, the offset, the data."""

    name: str
    offset: int
    data: bytes
    error: OSError | None = None
    """Raised after `data` was written."""


class StorageFault(Protocol):
    """Modifies writes."""

    def __call__(self, write: Write) -> Write:
        """The write to perform instead."""
        ...


@dataclass(frozen=True, kw_only=True)
class Slow:
    """Delays every write to a matching file."""

    seconds_per_write: Duration
    files: str = "*"
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        pause = as_timedelta("seconds_per_write", self.seconds_per_write, allow_zero=True)
        object.__setattr__(self, "seconds_per_write", pause.total_seconds())

    def __call__(self, write: Write) -> Write:
        if fnmatch.fnmatch(write.name, self.files):
            self.sleep(seconds(self.seconds_per_write))
        return write


@dataclass(kw_only=True)
class Full:
    """Limits the storage to `capacity_bytes`: writes as much as fits, then raises ENOSPC."""

    capacity_bytes: int
    used_bytes: int = field(default=0, init=False)

    def __call__(self, write: Write) -> Write:
        free = self.capacity_bytes - self.used_bytes
        self.used_bytes += min(free, len(write.data))
        if len(write.data) <= free:
            return write
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), write.name)
        return replace(write, data=write.data[:free], error=error)


@dataclass(frozen=True, kw_only=True)
class Torn:
    """Cuts off a matching file after `at_byte` bytes.

    A write past that byte fails with EIO; or, with `silently`, it and all later ones appear to
    succeed, as when a machine dies before its page cache is on disk.
    """

    at_byte: int
    files: str = "*"
    silently: bool = False

    def __call__(self, write: Write) -> Write:
        free = max(0, self.at_byte - write.offset)
        if len(write.data) <= free or not fnmatch.fnmatch(write.name, self.files):
            return write
        error = OSError(errno.EIO, os.strerror(errno.EIO), write.name)
        return replace(write, data=write.data[:free], error=None if self.silently else error)


@dataclass(frozen=True, kw_only=True)
class Flipped:
    """Silently inverts the byte at `offset` of a matching file."""

    offset: int
    files: str = "*"

    def __call__(self, write: Write) -> Write:
        index = self.offset - write.offset
        if not 0 <= index < len(write.data) or not fnmatch.fnmatch(write.name, self.files):
            return write
        data = bytearray(write.data)
        data[index] ^= 0xFF
        return replace(write, data=bytes(data))


class FaultyStorage:
    """The files of a folder, with faults on writes.

    Args:
        root: the folder, which must exist.
        faults: applied to every write, in this order.
    """

    def __init__(self, root: str | os.PathLike[str], *faults: StorageFault) -> None:
        self.root = Path(root)
        self._faults = faults

    def open(self, name: str, mode: str = "rb") -> BinaryIO:
        """Opens a file: `rb` to read, `wb` to overwrite, `ab` to append."""
        if mode not in ("rb", "wb", "ab"):
            raise ValueError(f"mode is {mode!r}; it must be 'rb', 'wb' or 'ab'")
        if mode == "rb":
            return (self.root / name).open("rb")
        # Not a RawIOBase, whose writes may be partial.
        return cast(BinaryIO, _FaultyFile(self.root / name, name, mode, self._faults))

    def exists(self, name: str) -> bool:
        """Whether the file exists."""
        return (self.root / name).exists()

    def replace(self, source: str, target: str) -> None:
        """Renames a file, replacing the target."""
        (self.root / source).replace(self.root / target)

    def remove(self, name: str) -> None:
        """Removes a file."""
        (self.root / name).unlink()

    def names(self) -> list[str]:
        """The paths of all files, relative to the root."""
        files = (path for path in self.root.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.root)) for path in files)


class _FaultyFile(io.BufferedIOBase):
    def __init__(self, path: Path, name: str, mode: str, faults: tuple[StorageFault, ...]) -> None:
        self._file = path.open(mode, buffering=0)
        self._name = name
        self._faults = faults
        self._offset = path.stat().st_size  # as the writer sees it, even after a silent fault

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def tell(self) -> int:
        return self._offset

    def write(self, data: Any) -> int:
        requested = bytes(data)
        write = Write(self._name, self._offset, requested)
        for fault in self._faults:
            write = fault(write)
            if write.error is not None:
                break  # later faults do not see the part that was cut off
        view = memoryview(write.data)
        while view:
            view = view[self._file.write(view) :]
        if write.error is not None:
            self._offset += len(write.data)
            raise write.error
        self._offset += len(requested)
        return len(requested)

    def close(self) -> None:
        self._file.close()
        super().close()


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
