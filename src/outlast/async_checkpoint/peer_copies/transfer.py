"""How a snapshot travels between hosts: each file of its buffer, by chunks, then its values.

Both ends take the checksum of each chunk while it is in the cache: the sender of what it sends, the
receiver of what has arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from outlast.async_checkpoint.peer_copies.connection import Connection
from outlast.async_checkpoint.storage.entries import is_count
from outlast.async_checkpoint.storage.manifest import checksum, pieces
from outlast.async_checkpoint.writer.handover import SnapshotDescription, StoredSnapshot
from outlast.async_checkpoint.writer.write_files import file_entry
from outlast.clock import Clock, MonotonicClock
from outlast.errors import CheckpointError
from outlast.system.error_text import describe
from outlast.system.shared_memory import SharedMemory

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


class Transfer:
    """A copy that is being sent. `cancel` returns at once; from then on the copy is never complete,
    even if this thread waits for the network: the receiver holds a copy only once it has the last
    frame, which is sent under a lock.
    """

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def cancel(self) -> None:
        with self._lock:
            self._cancelled.set()
            if self._connection is not None:
                self._connection.cut()

    def send(
        self, to: tuple[str, int], token: str, bytes_per_s: float, stored: StoredSnapshot
    ) -> None:
        """Sends the snapshot; returns when the other end has verified it."""
        try:
            connection = Connection.open(*to, token)
            try:
                with self._lock:
                    self._check()
                    self._connection = connection
                connection.send_frame({"op": "offer", **described(stored)})
                _check_accepted(connection)
                sent = send_content(connection, stored, Pace(bytes_per_s, self._cancelled))
                # The checksums of the main process, if it took any, also cover the time before.
                files = stored.description.get("files") or sent
                with self._lock:
                    self._check()
                    connection.send_frame({"files": files})
                _check_accepted(connection)
            finally:
                with self._lock:
                    self._connection = None
                connection.close()
        except Cancelled:
            raise CheckpointError("it was called off") from None
        except (OSError, EOFError, ValueError, KeyError) as e:
            cancelled = self._cancelled.is_set()
            cause = "it was called off" if cancelled else f"{to[0]}:{to[1]}: {describe(e)}"
            raise CheckpointError(cause) from e

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled


def _check_accepted(connection: Connection) -> None:
    answer = connection.receive_frame()
    if "error" in answer:
        raise CheckpointError(f"refused by its holder: {answer['error']}")


def fetch_copy(
    host: str, at: tuple[str, int], token: str, save_id: str, rank: int
) -> StoredSnapshot:
    """Fetches the copy of a rank's snapshot from the keeper at this address, on `host`."""
    where = f"the copy of rank {rank}'s snapshot on host {host}"
    try:
        connection = Connection.open(*at, token)
        try:
            connection.send_frame({"op": "fetch", "save_id": save_id, "rank": rank})
            answer = connection.receive_frame()
            if "error" in answer:
                raise CheckpointError(f"{where} cannot be fetched: {answer['error']}")
            check_described(answer)
            files = answer["snapshot"]["files"] or {}
            return receive_copy(connection, answer, lambda: files, where)
        finally:
            connection.close()
    except (OSError, EOFError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(
            f"{where} cannot be fetched from {at[0]}:{at[1]}: {describe(e)}"
        ) from e


def send_content(
    connection: Connection, stored: StoredSnapshot, pace: Pace | None = None
) -> Checksums:
    """Sends the content; returns the checksums of what was sent, if there is a pace."""
    found: Checksums = {}
    for name, part in stored.parts:
        sums = []
        for at, size in pieces(len(part)):
            chunk = part[at : at + size]
            if pace is None:
                connection.send(chunk)
                continue
            sums.append(checksum(chunk))
            for begin, length in pieces(size, _PACED_BYTES):
                pace.wait(length)
                connection.send(chunk[begin : begin + length])
        found[name] = file_entry(part, sums)
    return found


def receive_copy(
    connection: Connection,
    offer: Mapping[str, Any],
    expected: Callable[[], Mapping[str, Any]],
    where: str,
) -> StoredSnapshot:
    """Receives a snapshot of which the other end has sent the description (`check_described`);
    `expected` are its checksums.
    """
    description: SnapshotDescription = offer["snapshot"]
    memory = SharedMemory(offer["size_bytes"])
    stored = StoredSnapshot(description, bytearray(offer["values_bytes"]), memory)
    try:
        arrived: Checksums = {}
        for name, part in stored.parts:
            sums = []
            for at, size in pieces(len(part)):
                chunk = part[at : at + size]
                connection.receive_into(chunk)
                sums.append(checksum(chunk))
            arrived[name] = file_entry(part, sums)
        check_equal(arrived, expected(), where)
    except BaseException:
        memory.close()
        raise
    description["files"] = arrived
    return stored


def check_equal(arrived: Checksums, expected: Mapping[str, Any], where: str) -> None:
    """Compares checksums."""
    for name, entry in arrived.items():
        other = expected.get(name)
        if other is None or other["size_bytes"] != entry["size_bytes"]:
            raise CheckpointError(f"{where} has another file {name} than announced")
        places = pieces(entry["size_bytes"])
        if len(other["checksums"]) != len(places):
            raise CheckpointError(f"{where} lacks checksums of {name}")
        for (at, size), one, two in zip(
            places, entry["checksums"], other["checksums"], strict=True
        ):
            if one != two:
                raise CheckpointError(
                    f"{where}/{name} is damaged between bytes {at} and {at + size}"
                )


def described(stored: StoredSnapshot) -> dict[str, Any]:
    """What the receiver must know before the content."""
    return {
        "snapshot": stored.description,
        "size_bytes": stored.memory.size_bytes,
        "values_bytes": len(stored.values),
    }


def check_described(offer: Mapping[str, Any]) -> None:
    """Checks what another host says about a snapshot, before memory is allocated for it.

    Raises:
        ValueError, TypeError, KeyError: if it is not a description, or the files do not fit into
            the announced size.
    """
    snapshot, size_bytes = offer["snapshot"], offer["size_bytes"]
    if not (is_count(size_bytes) and is_count(offer["values_bytes"])):
        raise ValueError(f"sizes of {size_bytes!r} and {offer['values_bytes']!r} bytes")
    numbers = ("step", "number", "rank", "world_size")
    texts = ("save_id", "folder_id", "working", "final", "values", "socket", "index")
    for name in (*numbers, *texts):
        if not (is_count(snapshot[name]) if name in numbers else isinstance(snapshot[name], str)):
            raise ValueError(f"a snapshot whose {name} is {snapshot[name]!r}")
    for name, at, size in snapshot["layout"]:
        counts = is_count(at) and is_count(size)
        if not (isinstance(name, str) and counts and at + size <= size_bytes):
            raise ValueError(f"the file {name!r} is not within the {size_bytes} bytes")
