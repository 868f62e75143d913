"""Faults in storage: in existing files, for tests of what a program does with a damaged checkpoint,
and in what a writer process writes under a plan.

    python -m outlast.chaos.storage

is the program of such a writer process: the real one, with these faults. `outlast.chaos.install`
makes checkpointers start it, if the plan has such faults. It asks the injector
(`writer_server.py`) before each operation, and carries out the fault in the answer.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, cast

from outlast.async_checkpoint.inspection import MANIFEST, FileWriter, Storage, run_writer
from outlast.chaos.kinds import Kind
from outlast.chaos.writer_server import PUBLISH, PUBLISHED, PUT, WRITE, address_of


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


_ANSWER_S = 10.0  # a main process that is stopped, or has its GIL held, does not answer


class Injector:
    """The connection to the injector in the main process. Without one, there are no faults."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stream: Any = None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(address_of(os.getppid()))
            self._stream = connection.makefile("rw")
        except OSError:
            connection.close()  # the main process has ended, or its injector was removed

    def ask(self, operation: str) -> tuple[Kind | None, float]:
        with self._lock:
            if self._stream is None:
                return None, 0.0
            try:
                self._stream.write(operation + "\n")
                self._stream.flush()
                answer = json.loads(self._stream.readline() or "{}")
            except OSError:
                self._stream = None
                return None, 0.0
        return Kind(answer["kind"]) if answer else None, float(answer.get("seconds", 0.0))


class FaultyStorage:
    """A storage with faults in what it writes."""

    def __init__(self, real: Storage, injector: Injector) -> None:
        self._real, self._injector = real, injector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create(self, folder: str, name: str, size_bytes: int) -> FileWriter:
        # An object store takes pieces of equal sizes only.
        splits = hasattr(self._real, "root")
        return _FaultyFile(
            self._real.create(folder, name, size_bytes), name, self._injector, splits
        )

    def put(self, folder: str, name: str, content: bytes) -> None:
        kind, seconds = self._injector.ask(PUT) if name == MANIFEST else (None, 0.0)
        half = content[: len(content) // 2]
        match kind:
            case Kind.DISK_FULL:
                self._real.put(folder, name, half)
                raise _no_space(name)
            case Kind.SLOW_DISK:
                time.sleep(seconds)
            case Kind.TORN_WRITE:
                content = half
            case Kind.FLIPPED_BYTE:
                content = half + _flipped(content[len(half) :])
            case _:
                pass
        self._real.put(folder, name, content)

    def publish(self, working: str, final: str) -> str:
        self._injector.ask(PUBLISH)
        replaced = self._real.publish(working, final)
        kind, _ = self._injector.ask(PUBLISHED)
        root = getattr(self._real, "root", None)
        if kind is None or root is None:
            return replaced
        files = sorted(Path(root, final).iterdir(), key=lambda path: path.stat().st_size)
        largest = files[-1]
        half = largest.stat().st_size // 2
        if kind is Kind.TORN_WRITE:
            os.truncate(largest, half)
        elif half:
            flip_byte(largest, half)
        return replaced


class _FaultyFile:
    """A file being written. Half of each piece is written when the injector is asked."""

    def __init__(self, real: FileWriter, name: str, injector: Injector, splits: bool) -> None:
        self._real, self._name, self._injector, self._splits = real, name, injector, splits
        self._kept: list[memoryview] = []  # must not change before `finish`

    def write_at(self, offset: int, data: memoryview) -> None:
        # In whole pages, or the file could not be written past the page cache any more.
        half = len(data) // 2 // mmap.PAGESIZE * mmap.PAGESIZE if self._splits else 0
        if half:
            self._real.write_at(offset, data[:half])
        kind, seconds = self._injector.ask(WRITE)
        rest = data[half:]
        match kind:
            case Kind.DISK_FULL:
                raise _no_space(self._name)
            case Kind.TORN_WRITE:
                if half:
                    return
                rest = rest[: len(rest) // 2]
            case Kind.SLOW_DISK:
                time.sleep(seconds)
            case Kind.FLIPPED_BYTE:
                # Anonymous memory begins at a page, as writes past the page cache need it.
                copy = memoryview(mmap.mmap(-1, len(rest)))
                copy[:] = _flipped(bytes(rest))
                self._kept.append(copy)
                rest = copy
            case _:
                pass
        self._real.write_at(offset + half, rest)

    def finish(self) -> None:
        self._real.finish()

    def abandon(self) -> None:
        self._real.abandon()


def _no_space(name: str) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :] if data else data


def main() -> None:
    """Runs the writer process."""
    run_writer(lambda storage: cast(Storage, FaultyStorage(storage, Injector())))


if __name__ == "__main__":
    main()
