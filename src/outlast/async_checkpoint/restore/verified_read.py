"""Reads parts of a checkpoint into memory, and verifies every chunk that it reads.

A chunk is the unit that has a checksum. It is read in sections that fit in the cache, and hashed
where they arrive: in the destination if one takes all of the section, else in a buffer. So every
byte comes from memory once, also where many destinations share a chunk. From memory, a chunk is
copied, and hashed at its source while it is in the cache. Several threads do this at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import xxhash

from outlast.async_checkpoint.environment import local_ranks
from outlast.async_checkpoint.storage.entries import Contents
from outlast.async_checkpoint.storage.manifest import CHUNK_BYTES, Manifest, Sections, read_hashed
from outlast.async_checkpoint.storage.protocol import FileReader, Storage
from outlast.async_checkpoint.storage.system_errors import Reopened
from outlast.errors import CheckpointError
from outlast.system.files import read_fully
from outlast.system.parallel import in_threads
from outlast.system.shared_memory import MemoryName, memory_at, move

# Fits into a core's own cache: what was copied is still there when it is hashed.
_CACHED_BYTES = 768 << 10

Chunk = tuple[str, int]  # a file, and the number of the chunk in it


@dataclasses.dataclass(frozen=True)
class Piece:
    """Bytes of a file, and the address to read them to. `owner` keeps that memory alive."""

    file: str
    at: int
    size_bytes: int
    address: int
    owner: Any


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint on storage, or a snapshot in memory: what is read from it, and where it is."""

    where: str
    contents: Contents
    chunk_bytes: int
    open: Callable[[str], FileReader]


def storage_source(storage: Storage, folder: str, manifest: Manifest) -> Source:
    """A checkpoint on storage."""
    where = f"{storage.where}/{folder}"
    return Source(where, manifest, manifest.chunk_bytes, partial(storage.open, folder))


def memory_source(where: str, contents: Contents, views: Mapping[str, memoryview]) -> Source:
    """A snapshot in memory; `views` are the contents of its files, by name."""
    return _source(where, contents, lambda name: _MemoryReader(views[name]))


def borrowed_source(
    where: str, contents: Contents, memory: MemoryName, places: Mapping[str, tuple[int, int]]
) -> Source:
    """A snapshot in the memory of another process of this host; `places` are the first byte and the
    size of each file. It is read like a file: a process that shortens its memory ends no reader.
    """
    return _source(where, contents, lambda name: _BorrowedReader(memory, *places[name]))


def _source(where: str, contents: Contents, open_file: Callable[[str], FileReader]) -> Source:
    def open_known(name: str) -> FileReader:
        try:
            return open_file(name)
        except KeyError:
            raise CheckpointError(f"{where}/{name} is missing") from None

    return Source(where, contents, CHUNK_BYTES, open_known)


class _BorrowedReader:
    at_once = _CACHED_BYTES

    def __init__(self, memory: MemoryName, begin: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._begin, self._descriptor = begin, memory.open()

    def read_into(self, offset: int, buffer: memoryview) -> int:
        wanted = buffer[: max(self.size_bytes - offset, 0)]
        return read_fully(self._descriptor, self._begin + offset, wanted)

    def close(self) -> None:
        os.close(self._descriptor)


class _MemoryReader:
    at_once = _CACHED_BYTES

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.size_bytes = len(view)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        part = self.view[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        pass


def read_verified(source: Source, wanted: Sequence[Piece], threads: int | None = None) -> None:
    """Reads the pieces. A `CheckpointError` names the first chunk that is missing or damaged, when
    destinations may have been written to; a `CheckpointReadError`, a file that cannot be read now.
    """
    by_chunk = pieces_by_chunk(source, wanted)
    readers: dict[str, Reopened] = {}

    def work(chunks: Iterator[tuple[Chunk, list[Piece]]]) -> None:
        scratch = functools.cache(lambda size_bytes: memoryview(bytearray(size_bytes)))
        for chunk, pieces in chunks:
            begin, size = extent_of(source, chunk)
            reader = readers[chunk[0]]
            if isinstance(reader.newest, _MemoryReader):
                content = reader.newest.view[begin : begin + size]
                _copy_chunk(source, chunk, content, begin, pieces)
                continue
            sections = partial(_sections, begin, begin + size, pieces, scratch)
            read_chunk(source, reader, chunk, sections)

    with contextlib.ExitStack() as stack:
        for name in {name for name, _ in by_chunk}:
            readers[name] = stack.enter_context(opened(source, name))
        threads = min(threads or default_threads(), len(by_chunk))
        in_memory = (_MemoryReader, _BorrowedReader)
        if threads < 2 and all(isinstance(each.newest, in_memory) for each in readers.values()):
            work(iter(by_chunk.items()))
        else:  # a restart must be able to interrupt this one, even if storage does not answer
            in_threads(work, by_chunk.items(), threads, "outlast-read")


def default_threads() -> int:
    """This rank's share of the host's processors."""
    return max(1, min(8, (os.cpu_count() or 1) // local_ranks()))


def pieces_by_chunk(source: Source, wanted: Iterable[Piece]) -> dict[Chunk, list[Piece]]:
    """The chunks that are read for these pieces."""
    found: dict[Chunk, list[Piece]] = {}
    for piece in wanted:
        if piece.size_bytes:
            first = piece.at // source.chunk_bytes
            last = (piece.at + piece.size_bytes - 1) // source.chunk_bytes
            for number in range(first, last + 1):
                found.setdefault((piece.file, number), []).append(piece)
    return found


def extent_of(source: Source, chunk: Chunk) -> tuple[int, int]:
    """The first byte of a chunk in its file, and how many it has."""
    name, number = chunk
    begin = number * source.chunk_bytes
    return begin, min(source.chunk_bytes, source.contents.files[name].size_bytes - begin)


def is_intact(source: Source, chunk: Chunk, found: str) -> bool:
    """Whether this is the chunk's checksum."""
    name, number = chunk
    checksums = source.contents.files[name].checksums
    return number < len(checksums) and checksums[number] == found


def check_sizes(source: Source, names: Iterable[str]) -> None:
    """Checks the sizes of files before memory is allocated for them. Raises as `read_verified`."""
    for name in names:
        with opened(source, name):
            pass


def opened(source: Source, name: str) -> Reopened:
    """An open file of the source; closed by `with`. Raises as `read_verified`."""
    where = f"{source.where}/{name}"
    if name not in source.contents.files:
        raise CheckpointError(f"{where} is not in the manifest")
    reader = Reopened(where, lambda: source.open(name))
    size, expected = reader.newest.size_bytes, source.contents.files[name].size_bytes
    if size != expected:
        with reader:
            raise CheckpointError(f"{where} has {size} bytes instead of {expected}")
    return reader


def read_chunk(source: Source, reader: Reopened, chunk: Chunk, sections: Sections) -> None:
    """Reads a chunk into the `sections`, and verifies it. Raises as `read_verified`."""
    begin, size = extent_of(source, chunk)
    got, found = reader.read(lambda file: read_hashed(file, begin, sections))
    if got != size:
        of = source.contents.files[chunk[0]].size_bytes
        where = f"{source.where}/{chunk[0]}"
        raise CheckpointError(f"{where} is truncated: {begin + got} bytes instead of {of}")
    if not is_intact(source, chunk, found):
        raise _damaged(source, chunk)


def _copy_chunk(
    source: Source, chunk: Chunk, content: memoryview, begin: int, pieces: Sequence[Piece]
) -> None:
    """Copies and hashes a chunk in memory, in sections that fit in the cache.

    The copy comes first: it waits for the memory of source and destination at once, and the hash
    then reads from the cache. In the other order the two waits add up.
    """
    digest = xxhash.xxh3_128()
    address = address_of(content)
    for at in range(0, len(content), _CACHED_BYTES):
        stretch = content[at : at + _CACHED_BYTES]
        distribute(address + at, begin + at, begin + at + len(stretch), pieces)
        digest.update(stretch)
    if not is_intact(source, chunk, digest.hexdigest()):
        raise _damaged(source, chunk)


def _sections(
    begin: int,
    end: int,
    pieces: Sequence[Piece],
    scratch: Callable[[int], memoryview],
    at_once: int,
) -> Iterator[memoryview]:
    """The memory for the bytes from `begin` to `end` of a file, section by section: that of the
    only piece which takes it, or `scratch`, which is distributed once the next one is asked for.
    """
    few = max(1, at_once // 8)  # less than that is not worth a read of its own
    waiting, live = deque(sorted(pieces, key=lambda piece: piece.at)), list[Piece]()
    at = begin
    while at < end:
        live = [piece for piece in live if piece.at + piece.size_bytes > at]
        while waiting and waiting[0].at <= at:
            live.append(waiting.popleft())
        edges = [end, at + at_once, *(each.at + each.size_bytes for each in live)]
        edge = min(*edges, waiting[0].at if waiting else end)
        if len(live) == 1 and (edge == end or edge - at >= few):
            yield memory_at(live[0].address + at - live[0].at, edge - at)
        else:
            edge = min(at + few, end)
            while waiting and waiting[0].at < edge:
                live.append(waiting.popleft())
            section = scratch(min(few, end - begin))[: edge - at]
            yield section
            distribute(address_of(section), at, edge, live)
        at = edge


def distribute(address: int, begin: int, end: int, pieces: Sequence[Piece]) -> None:
    """Copies the bytes from `begin` to `end` of the file, which are at `address`, to the pieces."""
    for piece in pieces:
        low, high = max(begin, piece.at), min(end, piece.at + piece.size_bytes)
        if low < high:
            move(piece.address + low - piece.at, address + low - begin, high - low)


def _damaged(source: Source, chunk: Chunk) -> CheckpointError:
    begin, size = extent_of(source, chunk)
    where = f"{source.where}/{chunk[0]}"
    return CheckpointError(f"{where} is damaged between bytes {begin} and {begin + size}")


def address_of(chunk: memoryview) -> int:
    """Where the bytes are, for a `Piece`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(chunk))
