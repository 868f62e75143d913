"""How a snapshot travels between hosts, by TCP: each file of its buffer by chunks, then its values.
Both ends take the checksum of each chunk that they send or receive, while it is in the cache.

Both ends prove that they know the token, which is made for each checkpointer and known to its ranks
only: in a job with a secret (`OUTLAST_TOKEN`) it is derived from that; otherwise it is a random
number in the job's store, for every process that can read the store. Neither end sends it: each
answers a random challenge of the other with an HMAC. After that come frames (a length, then JSON)
and raw bytes. Nothing is unpickled. As in collectives, the bytes are not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from outlast.async_checkpoint.storage.entries import is_count
from outlast.async_checkpoint.storage.manifest import checksum, pieces
from outlast.async_checkpoint.writer.handover import SnapshotDescription, StoredSnapshot
from outlast.async_checkpoint.writer.write_files import file_entry
from outlast.clock import Clock, MonotonicClock
from outlast.errors import CheckpointError
from outlast.system.error_text import describe
from outlast.system.shared_memory import SharedMemory

STALL_S = 30.0
"""How long one end waits for the other to take or send the next bytes."""
_CONNECT_S = 10.0
_HANDSHAKE_S = 10.0
_NONCE_BYTES = 32
_LENGTH = struct.Struct(">Q")
_MAX_FRAME_BYTES = 256 << 20
# The class of background traffic (CS1): routers that tell classes apart serve others first.
_BACKGROUND = 0x20
_PIECE_BYTES = 1 << 20
_PACED_BYTES = 256 << 10  # at once: small, so that other traffic waits for little

Checksums = dict[str, dict[str, Any]]
"""`size_bytes` and `checksums` of each file, as in the manifest."""


class ConnectionRefused(CheckpointError):
    """The other end is not a process of this job, or does not accept this one as such."""


class Connection:
    """One end of a connection. One thread uses it at a time, but any thread may `cut` it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.settimeout(STALL_S)

    @classmethod
    def open(cls, address: str, port: int, token: str) -> Connection:
        sock = socket.create_connection((address, port), timeout=_CONNECT_S)
        try:
            _mark_as_background(sock)
            theirs = _receive(sock, _NONCE_BYTES, deadline := time.monotonic() + _HANDSHAKE_S)
            ours = secrets.token_bytes(_NONCE_BYTES)
            sock.sendall(ours + _proof(token, b"client", theirs + ours))
            try:
                proof = _receive(sock, hashlib.sha256().digest_size, deadline)
            except EOFError:
                proof = b""
            if not hmac.compare_digest(proof, _proof(token, b"server", ours + theirs)):
                raise ConnectionRefused(f"{address}:{port} does not belong to this job")
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    @classmethod
    def accept(cls, sock: socket.socket, token: str) -> Connection:
        """The other side of `open`."""
        _mark_as_background(sock)
        deadline = time.monotonic() + _HANDSHAKE_S
        sock.settimeout(_HANDSHAKE_S)
        ours = secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(ours)
        theirs = _receive(sock, _NONCE_BYTES, deadline)
        proof = _receive(sock, hashlib.sha256().digest_size, deadline)
        if not hmac.compare_digest(proof, _proof(token, b"client", ours + theirs)):
            raise ConnectionRefused("a client without the token of this job")
        sock.sendall(_proof(token, b"server", theirs + ours))
        return cls(sock)

    def send_frame(self, content: dict[str, Any]) -> None:
        data = json.dumps(content, separators=(",", ":")).encode()
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive_frame(self) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(_receive(self._socket, _LENGTH.size))
        if length > _MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes")
        found = json.loads(_receive(self._socket, length))
        if not isinstance(found, dict):
            raise ValueError("a frame that is not a JSON object")
        return found

    def send(self, data: memoryview) -> None:
        self._socket.sendall(data)

    def send_now(self, data: bytes) -> bytes:
        """Sends what the kernel takes without a wait; returns the rest."""
        try:
            sent = os.write(self._socket.fileno(), data)  # not `send`, which waits for `STALL_S`
        except BlockingIOError:
            sent = 0
        return data[sent:]

    def receive_into(self, buffer: memoryview) -> None:
        """Fills the buffer; an `EOFError` if the other end is gone before."""
        _receive_into(self._socket, buffer)

    def cut(self) -> None:
        """Ends the connection; a thread that uses it gets an error at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _proof(token: str, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), role + nonces, "sha256")


def _mark_as_background(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # only a hint
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _BACKGROUND)
        else:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _BACKGROUND)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(sock: socket.socket, size_bytes: int, deadline: float | None = None) -> bytes:
    data = bytearray(size_bytes)
    _receive_into(sock, memoryview(data), deadline)
    return bytes(data)


def _receive_into(sock: socket.socket, buffer: memoryview, deadline: float | None = None) -> None:
    while buffer:
        if deadline is not None:  # for all of it: one byte now and then would renew a timeout
            sock.settimeout(max(1e-3, deadline - time.monotonic()))
        count = sock.recv_into(buffer[:_PIECE_BYTES])
        if not count:
            raise EOFError("the other end has closed the connection")
        buffer = buffer[count:]


class Cancelled(Exception):
    """The copy was called off."""


class Pace:
    """Limits the rate at which bytes are sent, without bursts."""

    def __init__(
        self, bytes_per_s: float, cancelled: threading.Event, clock: Clock | None = None
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._bytes_per_s, self._cancelled = bytes_per_s, cancelled
        self._free_at = 0.0

    def wait(self, size_bytes: int) -> None:
        """Waits until these bytes may be sent; raises `Cancelled`."""
        now = self._clock.now()
        if self._cancelled.wait(max(self._free_at - now, 0.0)):
            raise Cancelled
        self._free_at = max(self._free_at, now) + size_bytes / self._bytes_per_s


class Transfer:
    """A copy that is being sent. `cancel` returns at once; from then on it is never complete, even
    if this thread waits for the network: the receiver holds it only after the last frame, sent
    under a lock.
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
    """Receives the snapshot of an offer (`check_described`) with these `expected` checksums."""
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
    """Checks what another host says about a snapshot before memory is allocated for it: a
    `ValueError`, `TypeError` or `KeyError` if it is none, or its files do not fit in.
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
