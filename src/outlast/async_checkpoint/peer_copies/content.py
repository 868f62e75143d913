"""The bytes of a snapshot on a connection: each file of its buffer, by chunks, then its values.

Both ends take the checksum of each chunk while it is in the cache: the sender of what it sends, the
receiver of what has arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from outlast.async_checkpoint.peer_copies.connection import Connection
from outlast.async_checkpoint.peer_copies.messages import SentSnapshot
from outlast.async_checkpoint.storage.entries import is_count
from outlast.async_checkpoint.storage.manifest import checksum, pieces
from outlast.clock import Clock, MonotonicClock
from outlast.errors import CheckpointError

_PACED_BYTES = 256 << 10  # at once: small, so that other traffic waits for little

Checksums = dict[str, dict[str, Any]]
"""`size_bytes` and `checksums` of each file, as in the manifest."""


class Cancelled(Exception):
    """The copy was called off."""


class Pace:
    """Limits the rate at which bytes are sent, without bursts."""

    def __init__(
        self, bytes_per_s: float, cancelled: threading.Event, clock: Clock | None = None
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._bytes_per_s = bytes_per_s
        self._cancelled = cancelled
        self._free_at = 0.0

    def wait(self, size_bytes: int) -> None:
        """Waits until these bytes may be sent; raises `Cancelled`."""
        now = self._clock.now()
        if self._cancelled.wait(max(self._free_at - now, 0.0)):
            raise Cancelled
        self._free_at = max(self._free_at, now) + size_bytes / self._bytes_per_s


def send_content(
    connection: Connection,
    snapshot: SentSnapshot,
    memory: memoryview,
    values: bytes,
    pace: Pace | None = None,
) -> Checksums:
    """Sends the content; returns the checksums of what was sent."""
    found: Checksums = {}
    for name, part in _parts(snapshot, memory, memoryview(values)):
        sums = []
        for at, size in pieces(len(part)):
            chunk = part[at : at + size]
            if pace is None:
                connection.send(chunk)
            else:
                sums.append(checksum(chunk))
                for begin, length in pieces(size, _PACED_BYTES):
                    pace.wait(length)
                    connection.send(chunk[begin : begin + length])
        found[name] = {"size_bytes": len(part), "checksums": sums}
    return found


def receive_content(
    connection: Connection, snapshot: SentSnapshot, memory: memoryview, values: memoryview
) -> Checksums:
    """Receives the content into `memory` and `values`; returns the checksums of what arrived."""
    found: Checksums = {}
    for name, part in _parts(snapshot, memory, values):
        sums = []
        for at, size in pieces(len(part)):
            chunk = part[at : at + size]
            connection.receive_into(chunk)
            sums.append(checksum(chunk))
        found[name] = {"size_bytes": len(part), "checksums": sums}
    return found


def check_equal(arrived: Checksums, expected: Mapping[str, Any], where: str) -> None:
    """Compares checksums.

    Raises:
        CheckpointError: names the file and the bytes that differ.
    """
    for name, entry in arrived.items():
        other = expected.get(name)
        if other is None or other["size_bytes"] != entry["size_bytes"]:
            raise CheckpointError(f"{where} has another file {name} than announced")
        places = pieces(entry["size_bytes"])
        for (at, size), one, two in zip(
            places, entry["checksums"], other["checksums"], strict=False
        ):
            if one != two:
                raise CheckpointError(
                    f"{where}/{name} is damaged between bytes {at} and {at + size}"
                )
        if len(other["checksums"]) != len(places):
            raise CheckpointError(f"{where} lacks checksums of {name}")


def check_description(snapshot: Any, size_bytes: Any, values_bytes: Any) -> None:
    """Checks what another host says about a snapshot, before memory is allocated for it.

    Raises:
        ValueError, TypeError, KeyError: if it is not a description, or the files do not fit into
            the announced size.
    """
    numbers = ("step", "number", "rank", "world_size")
    texts = ("save_id", "folder_id", "working", "final", "values", "socket", "index")
    if not (is_count(size_bytes) and is_count(values_bytes)):
        raise ValueError(f"sizes of {size_bytes!r} and {values_bytes!r} bytes")
    for name in (*numbers, *texts):
        if not (is_count(snapshot[name]) if name in numbers else isinstance(snapshot[name], str)):
            raise ValueError(f"a snapshot whose {name} is {snapshot[name]!r}")
    for name, at, size in snapshot["layout"]:
        counts = is_count(at) and is_count(size)
        if not (isinstance(name, str) and counts and at + size <= size_bytes):
            raise ValueError(f"the file {name!r} is not within the {size_bytes} bytes")


def _parts(
    snapshot: SentSnapshot, memory: memoryview, values: memoryview
) -> Iterator[tuple[str, memoryview]]:
    for name, at, size in snapshot["layout"]:
        yield name, memory[at : at + size]
    if snapshot["values"]:
        yield snapshot["values"], values
