"""How a chunk is read: in sections, into its destinations where they are large enough."""

from __future__ import annotations

import random
from typing import Any

import pytest

from outlast.async_checkpoint.restore.verified_read import (
    Piece,
    Source,
    address_of,
    read_verified,
)
from outlast.async_checkpoint.storage.entries import Contents, FileEntry
from outlast.async_checkpoint.storage.manifest import checksum, pieces
from outlast.errors import CheckpointError

_CHUNK = 256


class _Reader:
    """Notes what it was asked for."""

    def __init__(self, content: bytes, at_once: int) -> None:
        self.content, self.at_once, self.size_bytes = content, at_once, len(content)
        self.asked: list[tuple[int, int]] = []

    def read_into(self, offset: int, buffer: memoryview) -> int:
        part = self.content[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        self.asked.append((offset, len(buffer)))
        return len(part)

    def close(self) -> None:
        pass


def _source(content: bytes, at_once: int) -> tuple[Source, _Reader]:
    sums = [checksum(content[at : at + n]) for at, n in pieces(len(content), _CHUNK)]
    reader = _Reader(content, at_once)
    contents = Contents({"file": FileEntry("file", len(content), sums)}, {}, {})
    return Source("here", contents, _CHUNK, lambda _: reader), reader


def _piece(at: int, size: int) -> tuple[Piece, bytearray]:
    into: Any = bytearray(size)
    return Piece("file", at, size, address_of(memoryview(into)), into), into


@pytest.mark.parametrize("seed", range(200))
def test_every_piece_gets_its_bytes_and_each_byte_is_read_once(seed: int) -> None:
    draw = random.Random(seed)
    content = draw.randbytes(draw.randint(1, 5 * _CHUNK))
    source, reader = _source(content, draw.choice([1, 8, 33, 64, _CHUNK, 1 << 62]))
    wanted = []
    for _ in range(draw.randint(1, 12)):  # apart, adjacent, or over one another
        at = draw.randrange(len(content))
        wanted.append((at, *_piece(at, draw.randint(1, draw.choice([4, 40, 700])))))
    wanted = [each for each in wanted if each[0] + each[1].size_bytes <= len(content)]
    read_verified(source, [piece for _, piece, _ in wanted], threads=1)
    for at, piece, into in wanted:
        assert into == content[at : at + piece.size_bytes]
    needed = {
        each // _CHUNK for at, piece, _ in wanted for each in range(at, at + piece.size_bytes)
    }
    found = sorted(each for at, size in reader.asked for each in range(at, at + size))
    assert found == [each for each in range(len(content)) if each // _CHUNK in needed]
    assert all(size <= reader.at_once for _, size in reader.asked)


def test_a_long_run_is_read_in_place_between_short_ones() -> None:
    source, reader = _source(bytes(range(_CHUNK)), 64)
    wanted = [_piece(0, 4), _piece(4, 3), _piece(9, 200), _piece(230, 26)]
    read_verified(source, [piece for piece, _ in wanted], threads=1)
    # Of 64 bytes at once, a run of 8 or more is read in place, from where the buffer ends.
    assert reader.asked == [
        (0, 8),
        (8, 8),
        (16, 64),
        (80, 64),
        (144, 64),
        (208, 8),
        (216, 8),
        (224, 8),
        (232, 24),
    ]


def test_where_a_read_is_a_request_a_chunk_is_one() -> None:
    source, reader = _source(bytes(_CHUNK), 1 << 62)
    read_verified(source, [_piece(3, 100)[0], _piece(120, 136)[0]], threads=1)
    assert reader.asked == [(0, _CHUNK)]


@pytest.mark.parametrize("at", [0, 100, _CHUNK - 1])
def test_a_wrong_byte_is_found_in_a_piece_and_between_pieces(at: int) -> None:
    content = bytearray(2 * _CHUNK)
    source, reader = _source(bytes(content), 64)
    content[at] = 1
    reader.content = bytes(content)
    with pytest.raises(CheckpointError, match="damaged between bytes 0 and 256"):
        read_verified(source, [_piece(90, 300)[0]], threads=1)


def test_a_file_that_ends_early_is_truncated() -> None:
    source, reader = _source(bytes(_CHUNK), 64)
    reader.content = reader.content[:100]
    with pytest.raises(CheckpointError, match="truncated: 100 bytes instead of 256"):
        read_verified(source, [_piece(0, _CHUNK)[0]], threads=1)
