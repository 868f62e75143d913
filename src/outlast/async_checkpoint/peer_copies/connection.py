"""A TCP connection between hosts on which copies travel: both ends prove that they know the token.

The token is made for each checkpointer, and known to its ranks only: in a job with a secret
(`OUTLAST_TOKEN`) it is derived from that; otherwise it is a random number in the job's store, and
who can read the store knows it.
Neither end sends it: each answers a random challenge of the other with an HMAC. After that come
frames (a length, then JSON) and raw bytes. Nothing that arrives is unpickled. The bytes are not
encrypted, as those of collectives are not.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from typing import Any

from outlast.errors import CheckpointError

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


class ConnectionRefused(CheckpointError):
    """The other end is not a process of this job, or does not accept this one as such."""


class Connection:
    """One end of a connection. One thread uses it at a time, but any thread may `cut` it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.settimeout(STALL_S)

    @classmethod
    def open(cls, address: str, port: int, token: str) -> Connection:
        """Connects to a keeper."""
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
        """Receives a JSON object."""
        (length,) = _LENGTH.unpack(_receive(self._socket, _LENGTH.size))
        if length > _MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes")
        found = json.loads(_receive(self._socket, length))
        if not isinstance(found, dict):
            raise ValueError("a frame that is not a JSON object")
        return found

    def send(self, data: memoryview) -> None:
        self._socket.sendall(data)

    def receive_into(self, buffer: memoryview) -> None:
        """Fills the buffer; an `EOFError` if the other end is gone before."""
        _receive_into(self._socket, buffer)

    def cut(self) -> None:
        """Ends the connection; a thread that uses it gets an error at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def listen(address: str) -> socket.socket:
    """A listening socket at this address only, on a port that the system chooses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=128)


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
