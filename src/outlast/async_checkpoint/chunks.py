"""The chunks of a snapshot's files: copied and checksummed in one go.

Whoever copies a chunk has its bytes in the cache, and hashes them there, for a tenth of what the
copy takes. The writer process would have to fetch all of them from memory once more, while the
training needs that memory for itself.

What is hashed is the source, not the copy: that has gone past the caches (`streaming.py`). So a
tensor that somebody writes to between the two gets a checksum that its copy does not have: such a
checkpoint is not taken for a good one, where before it was one, of a mixture. torch's own writes
are noticed at once (`copying.Guard`); this is about those that torch does not count. A tensor in
memory that other processes share is therefore left to the writer (`are_private`): programs that
train in several processes on one tensor, without locks, do so on purpose.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import xxhash

from outlast.async_checkpoint.arena import Arena, memory_at, pieces
from outlast.async_checkpoint.manifest import checksum
from outlast.async_checkpoint.streaming import move

__all__ = ["Chunks", "Move", "are_private", "told_of"]

Move = tuple[int, int, int]  # to, from, bytes

# What a core's own cache holds beside other things: copied, it is still there to be hashed.
_CACHED_BYTES = 768 << 10


def are_private(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether nobody but this process can write to the tensors."""
    return not any(tensor.is_shared() for tensor in tensors if tensor.device.type == "cpu")


def told_of(name: str, content: bytes) -> dict[str, dict[str, Any]]:
    """What `Chunks.told` would say of a file of this content."""
    checksums = [checksum(content[at : at + n]) for at, n in pieces(len(content))]
    return {name: {"size_bytes": len(content), "checksums": checksums}}


@dataclasses.dataclass
class _Chunk:
    file: str
    number: int
    begin: int
    end: int
    moves: list[Move]


class Chunks:
    """All chunks of a snapshot, in the order of their addresses. Who fills them keeps the memory
    that is moved, on both sides.

    Args:
        arena: what the snapshot goes to; what no move fills is there before a chunk is `filled`.
        files: name, first byte in the arena, size.
        moves: to the arena, in the order of their addresses there, none of them empty.
        hashed: whether to take the checksums; the writer does it otherwise.
    """

    def __init__(
        self,
        arena: Arena,
        files: Sequence[tuple[str, int, int]],
        moves: Sequence[Move],
        *,
        hashed: bool,
    ) -> None:
        self.hashed = hashed
        self._arena = arena.address
        self._files = files
        self._moves = moves
        self._checksums = {name: [""] * len(pieces(size)) for name, _, size in files}

    @functools.cached_property
    def _chunks(self) -> list[_Chunk]:
        """Made by who fills them, which need not be the thread that trains."""
        moves = self._moves
        ends = [to + size for to, _, size in moves]
        if any(end > to for end, (to, _, _) in zip(ends, moves[1:], strict=False)):
            raise ValueError("the moves are not in the order of their addresses")
        found = []
        for name, first, size in self._files:
            for number, (at, length) in enumerate(pieces(size)):
                begin = self._arena + first + at
                chunk = _Chunk(name, number, begin, begin + length, [])
                for i in range(bisect.bisect_right(ends, begin), len(moves)):
                    to, source, many = moves[i]
                    if to >= chunk.end:
                        break
                    low, high = max(to, begin), min(to + many, chunk.end)
                    chunk.moves.append((low, source + low - to, high - low))
                if self.hashed or chunk.moves:
                    found.append(chunk)
        return found

    def __len__(self) -> int:
        return len(self._chunks)

    def fill(self, number: int, called_off: Callable[[], bool] = lambda: False) -> int:
        """Copies and hashes one of the chunks; returns the address behind it."""
        chunk = self._chunks[number]
        digest = xxhash.xxh3_128() if self.hashed else None
        at = chunk.begin
        for to, source, size in chunk.moves:
            if digest is not None and at < to:
                digest.update(memory_at(at, to - at))
            content = memory_at(source, size)
            for done in range(0, size, _CACHED_BYTES):
                if called_off():
                    return chunk.begin
                stretch = content[done : done + _CACHED_BYTES]
                move(to + done, source + done, len(stretch))
                if digest is not None:
                    digest.update(stretch)
            at = to + size
        if digest is not None:
            if at < chunk.end:
                digest.update(memory_at(at, chunk.end - at))
            self._checksums[chunk.file][chunk.number] = digest.hexdigest()
        return chunk.end

    def told(self) -> dict[str, dict[str, Any]]:
        """Of each file `size_bytes` and `checksums`, as the manifest takes them; when all chunks
        are filled, and hashed.
        """
        return {
            name: {"size_bytes": size, "checksums": self._checksums[name]}
            for name, _, size in self._files
        }
