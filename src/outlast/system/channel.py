"""Messages between two processes of one host: bytes, and descriptors that go with them.

A message is its length (8 bytes, big-endian), then its payload. Descriptors travel with the
length, because the kernel delivers them with the first byte of the data they were sent with; so a
reader of a length has its descriptors, and never those of the next message.

The two ends define what a payload means; `pack` makes one of a JSON object and bytes.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

MAX_DESCRIPTORS = 253
"""How many descriptors one message may carry on Linux (SCM_MAX_FD)."""

_LENGTH = struct.Struct(">Q")
_ITEM_BYTES = array.array("i").itemsize
_PIECE_BYTES = 1 << 20


class Channel:
    """One end of a connection: a blocking Unix socket. Any thread may send, one may receive."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(one), cls(other)

    def limit(self, timeout_s: float) -> None:
        """Limits every wait for the other end. After a `TimeoutError`, close the channel."""
        with contextlib.suppress(OSError):  # it was closed meanwhile
            self._socket.settimeout(timeout_s)

    def send(self, payload: bytes, descriptors: Sequence[int] = ()) -> None:
        """Sends one message; blocks while the other end does not read, which `limit` may end by a
        `TimeoutError`. The descriptors are duplicated: the caller keeps its own, and may close them
        at any time. An `OSError` says that the other end is gone, or this one closed.
        """
        if len(descriptors) > MAX_DESCRIPTORS:
            raise ValueError(f"{len(descriptors)} descriptors, at most {MAX_DESCRIPTORS} allowed")
        rights = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        length = _LENGTH.pack(len(payload))
        size = len(length) + len(payload)
        sent: list[int] = []
        with self._sending:
            try:
                # An interrupt comes between two calls of Python's, most often after one that has
                # waited. These are one call: afterwards, what was sent is known in any case.
                sent.extend(map(self._socket.sendmsg, [[length, payload]], [ancillary]))
                if sent[0] < size:
                    self._socket.sendall((length + payload)[sent[0] :])
            except BaseException as e:
                # An incomplete message must not become the beginning of the next one.
                if isinstance(e, OSError) or 0 < sum(sent) < size:
                    self._shut_down()
                raise

    def receive(self) -> tuple[bytes, list[int]]:
        """Waits for one message; returns its payload and its descriptors, which the caller closes;
        programs that it starts do not inherit them. An `EOFError` says that the other end is gone,
        maybe amid a message; an `OSError`, that too many files are open for the descriptors.
        """
        descriptors: list[int] = []
        try:
            length = self._receive_length(descriptors)
            payload = bytearray(length)
            self._fill(memoryview(payload))
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return bytes(payload), descriptors

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def hung_up(self) -> bool:
        """Whether the other end is gone. There may be more to receive."""
        poll = select.poll()
        poll.register(self._socket, 0)
        return any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))

    def close(self) -> None:
        """Ends the connection; the other end reads what was sent, then the end."""
        self._socket.close()

    def _receive_length(self, descriptors: list[int]) -> int:
        data = b""
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * _ITEM_BYTES)
        while len(data) < _LENGTH.size:
            try:
                piece, ancillary, flags, _ = self._socket.recvmsg(
                    _LENGTH.size - len(data), room, socket.MSG_CMSG_CLOEXEC
                )
            except ConnectionResetError:  # it closed without reading what we sent
                piece, ancillary, flags = b"", [], 0
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    rights = array.array("i")
                    rights.frombytes(content[: len(content) - len(content) % rights.itemsize])
                    descriptors.extend(rights)
            if flags & socket.MSG_CTRUNC:
                self._shut_down()
                raise OSError("too many open files: descriptors that were sent are lost")
            if not piece:
                raise EOFError("the other end of the channel is gone")
            data += piece
        return int(_LENGTH.unpack(data)[0])

    def _fill(self, view: memoryview) -> None:
        while view:
            try:
                count = self._socket.recv_into(view[:_PIECE_BYTES])
            except ConnectionResetError:
                count = 0
            if not count:
                raise EOFError("the other end of the channel is gone, in the middle of a message")
            view = view[count:]

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):  # the other end has closed first
            self._socket.shutdown(socket.SHUT_RDWR)


def pack(header: dict[str, Any], blob: bytes = b"") -> bytes:
    """One payload of a JSON object, in a line, and the bytes that follow it."""
    return json.dumps(header, separators=(",", ":")).encode() + b"\n" + blob


def unpack(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """The inverse of `pack`."""
    header, _, blob = payload.partition(b"\n")
    return json.loads(header), blob
