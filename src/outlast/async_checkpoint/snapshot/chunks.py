"""The chunks of a snapshot's files: copied, and checksummed during the copy where that pays.

The thread that copies a chunk has its bytes in the cache, and hashes them there for a fifth of the
time of the copy; the writer process would have to read all of them from memory again. So the copy
that runs beside the training (`OverlappedCopy`) also hashes. Where the training waits for the copy
(`EagerCopy`), the writer hashes, and the training continues sooner.

The hash is of the source, not of the copy, because the copy bypasses the caches
(`snapshot/nontemporal_copy.py`). A tensor that is written to between its copy and its hash gets a
checksum that does not match its copy: such a checkpoint fails verification, where it would
otherwise hold a mixture of two states. Writes that torch counts are detected anyway; this concerns
those that torch does not count. Tensors in memory that other processes share are hashed by the
writer (`are_private`): programs that train one tensor from several processes without locks
(Hogwild) do so on purpose.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from outlast.async_checkpoint.snapshot.nontemporal_copy import move
from outlast.async_checkpoint.snapshot.shared_memory import SharedMemory, memory_at
from outlast.async_checkpoint.state_dict.last import Last
from outlast.async_checkpoint.storage.manifest import checksum, pieces

__all__ = ["Chunk", "ChunkCache", "Chunks", "are_private", "checksums_of_content", "cut"]

# What a core's own cache holds beside other things: copied, it is still there to be hashed.
_CACHED_BYTES = 768 << 10


def are_private(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether nobody but this process can write to the tensors."""
    return not any(tensor.is_shared() for tensor in tensors if tensor.device.type == "cpu")


def checksums_of_content(name: str, content: bytes) -> dict[str, dict[str, Any]]:
    """What `Chunks.checksums` returns for a file of this content."""
    checksums = [checksum(content[at : at + n]) for at, n in pieces(len(content))]
    return {name: {"size_bytes": len(content), "checksums": checksums}}


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A stretch of a file with a checksum of its own.

    Attributes:
        file, number: which.
        begin, end: where, in the memory.
        parts: of the moves that fill it: which, from its how manieth byte, where to in the memory,
            how much.
    """

    file: str
    number: int
    begin: int
    end: int
    parts: list[tuple[int, int, int, int]]


def cut(
    files: Sequence[tuple[str, int, int]], places: Sequence[tuple[int, int]], *, all_of_them: bool
) -> list[Chunk]:
    """Cuts files into chunks, and what is moved into them.

    Args:
        files: name, first byte in the memory, size.
        places: in the memory, of what is moved: first byte and size, in their order, none empty.
        all_of_them: whether also chunks into which nothing is moved.
    """
    ends = [at + size for at, size in places]
    if any(end > at for end, (at, _) in zip(ends, places[1:], strict=False)):
        raise ValueError("what is moved is not in the order of its places")
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
    """The chunks of a snapshot, in the order of their addresses. Who fills them keeps the memory
    that is moved, on both sides.

    Args:
        memory: what the snapshot goes to; what no move fills is there before a chunk is `filled`.
        chunks: of its files (`cut`).
        sources: the addresses that the moves are from.
        hashed: of which files the checksums are taken, and how large they are; the writer does it
            otherwise.
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
        self._chunks = chunks
        self._sources = sources
        self._sizes = hashed or {}
        self._checksums = {name: [""] * len(pieces(size)) for name, size in self._sizes.items()}

    def __len__(self) -> int:
        return len(self._chunks)

    def fill(self, number: int, called_off: Callable[[], bool] = lambda: False) -> int:
        """Copies and hashes one of the chunks; returns the address behind it."""
        chunk = self._chunks[number]
        digest = xxhash.xxh3_128() if self.hashed else None
        at = chunk.begin
        for which, offset, low, size in chunk.parts:
            if digest is not None and at < low:
                digest.update(memory_at(self._memory + at, low - at))
            source = self._sources[which] + offset
            content = memory_at(source, size)
            for done in range(0, size, _CACHED_BYTES):
                if called_off():
                    return self._memory + chunk.begin
                stretch = content[done : done + _CACHED_BYTES]
                move(self._memory + low + done, source + done, len(stretch))
                if digest is not None:
                    digest.update(stretch)
            at = low + size
        if digest is not None:
            if at < chunk.end:
                digest.update(memory_at(self._memory + at, chunk.end - at))
            self._checksums[chunk.file][chunk.number] = digest.hexdigest()
        return self._memory + chunk.end

    def checksums(self) -> dict[str, dict[str, Any]]:
        """Of each file `size_bytes` and `checksums`, as the manifest takes them; when all chunks
        are filled, and hashed.
        """
        return {
            name: {"size_bytes": size, "checksums": self._checksums[name]}
            for name, size in self._sizes.items()
        }


class ChunkCache:
    """Remembers how the files were cut the last time: a save that moves what the one before has
    moved only looks at the addresses.
    """

    def __init__(self) -> None:
        self._chunks: Last[list[Chunk]] = Last()

    def chunks(
        self,
        memory: SharedMemory,
        files: Sequence[tuple[str, int, int]],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        hashed: bool,
    ) -> Chunks:
        """The chunks of a shared memory.

        Args:
            memory: what the snapshot goes to.
            files: name, first byte in the memory, size.
            copies: from tensors in a row to tensors in the memory, in the order of these; what has
                no elements has no address, and is left out.
            hashed: whether the checksums are taken.
        """
        moved = [(source, to) for source, to in copies if source.nbytes]
        places = [(to.data_ptr() - memory.address, to.nbytes) for _, to in moved]
        chunks = self._chunks.of(
            (files, places, hashed), lambda: cut(files, places, all_of_them=hashed)
        )
        sources = [source.data_ptr() for source, _ in moved]
        sizes = {name: size for name, _, size in files} if hashed else None
        return Chunks(memory, chunks, sources, sizes)
