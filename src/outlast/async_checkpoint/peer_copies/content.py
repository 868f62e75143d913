"""Copies that a keeper holds, and how one travels on a connection.

A keeper holds at most two copies of each rank's snapshots, the older one complete everywhere. A
rank sends the copy of a save only once the copies of the save before have ended on all ranks, and
every keeper has released what that made superfluous (`rounds.py`). So a keeper that is sent a copy
holds one complete copy of that rank, besides the one that is arriving.

What travels is each file of the snapshot's buffer, by chunks, then its values. Both ends take the
checksum of each chunk while it is in the cache: the sender of what it sends, the receiver of what
has arrived.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from outlast.async_checkpoint.peer_copies.connection import Connection
from outlast.async_checkpoint.peer_copies.messages import SentSnapshot
from outlast.async_checkpoint.storage.entries import is_count
from outlast.async_checkpoint.storage.manifest import checksum, pieces
from outlast.clock import Clock, MonotonicClock
from outlast.errors import CheckpointError
from outlast.system.shared_memory import SharedMemory


@dataclasses.dataclass(frozen=True)
class HeldCopy:
    """A complete copy: the snapshot's description, with its checksums, and its bytes."""

    snapshot: SentSnapshot
    values: bytes
    memory: SharedMemory

    @property
    def key(self) -> tuple[str, int]:
        """The save and the rank."""
        return self.snapshot["save_id"], self.snapshot["rank"]


class HeldCopies:
    """All copies of a keeper. Any thread may use it."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, int], HeldCopy] = {}
        self._lock = threading.Lock()

    def all(self) -> list[HeldCopy]:
        """The copies, the oldest first."""
        with self._lock:
            return list(self._copies.values())

    def find(self, save_id: str, rank: int) -> HeldCopy | None:
        """The copy of a rank's snapshot of a save."""
        with self._lock:
            return self._copies.get((save_id, rank))

    def add(self, copy: HeldCopy) -> None:
        """Adds a complete copy; it replaces one of the same save and rank."""
        with self._lock:
            before = self._copies.pop(copy.key, None)
            self._copies[copy.key] = copy
        if before is not None:
            before.memory.close()

    def keep_only(self, save_ids: Collection[str]) -> None:
        """Releases the copies of other saves."""
        self._release([copy for copy in self.all() if copy.snapshot["save_id"] not in save_ids])

    def make_room(self, rank: int, folder_id: str) -> None:
        """Before a copy of this rank arrives: releases all but the newest one of that rank. There
        are more only after a fault that came before `keep_only`.
        """
        mine = [
            copy
            for copy in self.all()
            if (copy.snapshot["rank"], copy.snapshot["folder_id"]) == (rank, folder_id)
        ]
        self._release(mine[:-1])

    def _release(self, copies: Collection[HeldCopy]) -> None:
        with self._lock:
            released = [self._copies.pop(copy.key, None) for copy in copies]
        for copy in released:
            if copy is not None:
                copy.memory.close()


def available_bytes() -> int | None:
    """How much memory the system can give without swapping; `None` if it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


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


def receive_copy(
    connection: Connection,
    said: Mapping[str, Any],
    expected: Callable[[], Mapping[str, Any]],
    where: str,
) -> HeldCopy:
    """Receives a snapshot of which the other end has `said` the description, which is checked
    already, and the sizes; `expected` are its checksums.

    Raises:
        CheckpointError: if a byte has changed; names the file.
    """
    snapshot: SentSnapshot = said["snapshot"]
    memory = SharedMemory(said["size_bytes"])
    try:
        values = bytearray(said["values_bytes"])
        arrived: Checksums = {}
        for name, part in _parts(snapshot, memory.view, memoryview(values)):
            sums = []
            for at, size in pieces(len(part)):
                chunk = part[at : at + size]
                connection.receive_into(chunk)
                sums.append(checksum(chunk))
            arrived[name] = {"size_bytes": len(part), "checksums": sums}
        check_equal(arrived, expected(), where)
    except BaseException:
        memory.close()
        raise
    return HeldCopy({**snapshot, "files": arrived}, bytes(values), memory)


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
