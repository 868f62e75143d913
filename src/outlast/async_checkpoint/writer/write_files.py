"""Writes a snapshot buffer to files with several threads, and takes their checksums.

Each thread takes the next piece of any file, waits until it has been copied, and writes it. Unless
the main process takes the checksums, the thread hashes the chunks too: the disk writes one piece
while another thread hashes, and both release the GIL. The last piece makes a file durable.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from outlast.async_checkpoint.storage.manifest import CHUNK_BYTES, checksum, pieces
from outlast.async_checkpoint.storage.protocol import FileWriter, Storage
from outlast.system.parallel import in_threads

# The size of one write call. Measured on a virtual disk, bypassing the page cache: 4 MiB pieces
# take 1.2 times as long, 64 MiB ones 1.07 times.
PIECE_BYTES = 4 * CHUNK_BYTES

Files = Sequence[tuple[str, int, int]]  # name, offset in the buffer, size


class Dropped(Exception):
    """The save was dropped while it was being written."""


class _File:
    def __init__(self, name: str, view: memoryview, begin: int | None = None) -> None:
        self.name, self.view = name, view
        self.begin = begin  # its offset in the buffer; `None` for other content
        self.checksums = [""] * len(pieces(len(view)))
        self.left = max(len(pieces(len(view), PIECE_BYTES)), 1)
        self.writer: FileWriter | None = None

    @property
    def pieces(self) -> Sequence[tuple[int, int]]:
        return pieces(len(self.view), PIECE_BYTES) or [(0, 0)]


def write_files(
    storage: Storage,
    folder: str,
    memory: memoryview,
    files: Files,
    small: Mapping[str, bytes],
    *,
    threads: int,
    dropped: threading.Event,
    filled: Callable[[int], bool] = lambda upto: True,
    hashes: bool = True,
    make_room: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Writes files into `folder`, which is created, and returns when they are durable: `size_bytes`
    and `checksums` of each, as in the manifest.

    Args:
        memory, files: the buffer, and the files in it.
        small: content of other files, by name.
        dropped: set when the save was dropped.
        filled: waits until the buffer is filled up to an offset; `False` if it never will be.
        make_room: called once for each file that does not fit on the disk, before a second try.
        hashes: whether to take checksums; otherwise they are empty strings.

    Raises:
        Dropped: if the save was dropped.
        OSError: the error of the first piece that failed.
    """
    storage.make(folder)
    parts = [_File(name, memory[at : at + size], at) for name, at, size in files]
    parts += [_File(name, memoryview(content)) for name, content in small.items()]
    lock = threading.Lock()

    def create(part: _File) -> FileWriter:
        try:
            return storage.create(folder, part.name, len(part.view))
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        make_room()
        return storage.create(folder, part.name, len(part.view))

    def write(part: _File, at: int, size: int) -> None:
        whole = part.begin is None or filled(part.begin + at + size)
        if dropped.is_set() or not whole:
            raise Dropped
        with lock:
            if part.writer is None:
                part.writer = create(part)
        piece = part.view[at : at + size]
        for begin, length in pieces(size) if hashes else ():
            digest = checksum(piece[begin : begin + length])
            part.checksums[(at + begin) // CHUNK_BYTES] = digest
        if size:
            part.writer.write_at(at, piece)
        with lock:
            part.left -= 1
            last = part.left == 0
        if last:
            part.writer.finish()

    def work(jobs: Iterator[tuple[_File, int, int]]) -> None:
        for part, at, size in jobs:
            write(part, at, size)

    jobs = ((part, at, size) for part in parts for at, size in part.pieces)
    try:
        in_threads(work, jobs, max(1, threads), "outlast-write")
    except BaseException:
        for part in parts:
            if part.writer is not None and part.left:
                part.writer.abandon()
        raise
    storage.sync(folder)
    return {part.name: file_entry(part.view, part.checksums) for part in parts}


def file_entry(content: memoryview, checksums: Sequence[str]) -> dict[str, Any]:
    """What the manifest says about a file."""
    return {"size_bytes": len(content), "checksums": list(checksums)}


def checksums_of(files: Iterable[tuple[str, memoryview]]) -> dict[str, dict[str, Any]]:
    """The result of `write_files` for files that were never written."""
    return {
        name: file_entry(
            content, [checksum(content[at : at + n]) for at, n in pieces(len(content))]
        )
        for name, content in files
    }
