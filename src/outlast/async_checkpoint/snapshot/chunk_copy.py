"""The chunks of a snapshot's files: copied, and checksummed during the copy where that pays.

The thread that copies a chunk has its bytes in the cache, and hashes them there in a fifth of the
time of the copy; the writer process would have to read all of them from memory again. So the copy
that runs during training also hashes. Where training waits for the copy
(`EagerCopy`), the writer hashes, and training continues sooner.

The hash is of the source, not of the copy. A tensor that is written to between its copy and its
hash gets a checksum that does not match its copy: such a checkpoint fails verification, where it
would otherwise hold a mixture of two states. Writes that torch counts are detected anyway; this
concerns those that torch does not count. Tensors in memory that other processes share are hashed by
the writer (`Snapshotter`): programs that train one tensor from several processes without locks
(Hogwild) do so on purpose.

A restart in place may interrupt the training thread in the middle of an eager copy: the buffer is
given back, to the next save, only after `call_off`, which waits for the other threads.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash

from outlast.async_checkpoint.state_dict import Last
from outlast.async_checkpoint.storage.manifest import pieces
from outlast.system.shared_memory import SharedMemory, allocate, memory_at, move, move_quickly

# Fits a core's own cache: after the copy, it is still there to be hashed.
_CACHED_BYTES = 768 << 10
_AT_ONCE = 256  # small copies
_MAX_THREADS = 8  # fewer saturate the memory bandwidth of a host


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A section of a file, from `begin` to `end` in the buffer, with its own checksum. `parts` of
    copies fill it: index of the copy, offset in its source, offset in the buffer, size.
    """

    file: str
    number: int
    begin: int
    end: int
    parts: list[tuple[int, int, int, int]]


def cut(
    files: Sequence[tuple[str, int, int]], places: Sequence[tuple[int, int]], *, all_of_them: bool
) -> list[Chunk]:
    """Cuts files (name, offset in the buffer, size) into chunks, and copies into their parts.

    Args:
        places: offset in the buffer and size of each copy, in ascending order, none empty.
        all_of_them: whether to include chunks that no copy fills.
    """
    ends = [at + size for at, size in places]
    if any(end > at for end, (at, _) in zip(ends, places[1:], strict=False)):
        raise ValueError("the copies are not in the order of their places")
    found = []
    for name, first, size in files:
        for number, (offset, length) in enumerate(pieces(size)):
            begin = first + offset
            end = begin + length
            parts = []
            for i in range(bisect.bisect_right(ends, begin), len(places)):
                at, many = places[i]
                if at >= end:
                    break
                low, high = max(at, begin), min(at + many, end)
                parts.append((i, low - at, low, high - low))
            if all_of_them or parts:
                found.append(Chunk(name, number, begin, end, parts))
    return found


class Chunks:
    """The chunks of a snapshot, in the order of their addresses. The caller of `fill` keeps the
    memory of the copies alive, on both sides.

    Args:
        memory: the buffer's memory; bytes that no copy fills are there before the chunk is filled.
        sources: the source address of each copy.
        hashed: the size of each file, to take the checksums; `None` if the writer takes them.
    """

    def __init__(
        self,
        memory: SharedMemory,
        chunks: Sequence[Chunk],
        sources: Sequence[int],
        hashed: Mapping[str, int] | None,
    ) -> None:
        self.hashed = hashed is not None
        self._memory = memory.address
        self._allocates = not memory.is_populated
        self._chunks, self._sources = chunks, sources
        self._sizes = hashed or {}
        self._checksums = {name: [""] * len(pieces(size)) for name, size in self._sizes.items()}

    def __len__(self) -> int:
        return len(self._chunks)

    def fill(self, number: int, called_off: Callable[[], bool] = lambda: False) -> int:
        """Copies one chunk, and hashes it if asked to; returns the address of its end."""
        chunk = self._chunks[number]
        digest = xxhash.xxh3_128() if self.hashed else None
        at = chunk.begin
        if self._allocates:  # by each thread for itself, just before its bytes are in the cache
            allocate(self._memory + chunk.begin, chunk.end - chunk.begin)
        for which, offset, low, size in chunk.parts:
            if digest is not None and at < low:
                digest.update(memory_at(self._memory + at, low - at))
            source = self._sources[which] + offset
            content = memory_at(source, size)
            for done in range(0, size, _CACHED_BYTES):
                if called_off():
                    return self._memory + chunk.begin
                section = content[done : done + _CACHED_BYTES]
                move(self._memory + low + done, source + done, len(section))
                if digest is not None:
                    digest.update(section)
            at = low + size
        if digest is not None:
            if at < chunk.end:
                digest.update(memory_at(self._memory + at, chunk.end - at))
            self._checksums[chunk.file][chunk.number] = digest.hexdigest()
        return self._memory + chunk.end

    def settle(self) -> None:
        """When this returns, nothing is being copied; a copy here ends before `fill` returns."""

    def checksums(self) -> dict[str, dict[str, Any]]:
        """`size_bytes` and `checksums` of each file, as in the manifest, once all is hashed."""
        return {
            name: {"size_bytes": size, "checksums": self._checksums[name]}
            for name, size in self._sizes.items()
        }


class ChunkCache:
    """Remembers how files were cut: for the same copies again, only the addresses are new."""

    def __init__(self) -> None:
        self._chunks: Last[list[Chunk]] = Last()

    def chunks(
        self,
        memory: SharedMemory,
        files: Sequence[tuple[str, int, int]],
        places: Sequence[tuple[int, int]],
        sources: Sequence[int],
        hashed: bool,
    ) -> Chunks:
        """The chunks of a buffer that holds `files` (name, offset, size), filled from contiguous
        tensors at the addresses `sources`; `places` as for `cut`.
        """
        chunks = self._chunks.of(
            (files, places, hashed), lambda: cut(files, places, all_of_them=hashed)
        )
        sizes = {name: size for name, _, size in files} if hashed else None
        return Chunks(memory, chunks, sources, sizes)


class EagerCopy:
    """Fills chunks, with as many threads as torch uses, and keeps `held`, the memory, alive.

    Each thread takes the next chunk when it is done with one. torch's own copy cuts every tensor
    into equal parts and waits for the slowest one each time: if something else runs on one of the
    cores, such as the writer at the previous save, that takes many times as long.
    """

    def __init__(self, held: object, chunks: Chunks) -> None:
        self._held: object = held
        self._chunks = chunks
        # `next` on it is atomic: no two threads get the same number.
        self._left = iter(range(len(chunks)))
        self._called_off = False
        self._error: Exception | None = None
        count = min(torch.get_num_threads(), _MAX_THREADS, len(chunks)) - 1
        self._helpers = [_Helper(self._help) for _ in range(count)]

    def run(self) -> None:
        for helper in self._helpers:
            helper.start()
        self._take()
        self._await_helpers()
        if self._error is not None:
            raise self._error

    def call_off(self) -> None:
        """When this returns, nothing is being copied. If interrupted, call it again."""
        self._called_off = True
        self._await_helpers()

    def _await_helpers(self) -> None:
        for helper in self._helpers:
            if helper.ident is not None:  # else it never starts, or sees the call-off
                helper.ended.wait()  # not `join`: see `Snapshot._await_copy`
        self._held = ()  # this and the helpers are a cycle

    def _take(self) -> None:
        for number in self._left:
            if self._called_off:
                return
            self._chunks.fill(number, lambda: self._called_off)

    def _help(self) -> None:
        try:
            self._take()
        except Exception as e:  # noqa: BLE001 - `run` raises it
            self._error = e


def copy_small(copies: Iterator[tuple[int, int, int]]) -> None:
    """Copies many small contiguous tensors (to, from, size) in this thread: with a call for each
    that releases the GIL, training would wait for other threads each time.
    """
    while some := list(itertools.islice(copies, _AT_ONCE)):  # between these, others may run
        collections.deque(map(move_quickly, *zip(*some, strict=True)), maxlen=0)


class _Helper(threading.Thread):
    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="outlast-copy", daemon=True)
        self._work = work
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self._work()
        finally:
            self.ended.set()
