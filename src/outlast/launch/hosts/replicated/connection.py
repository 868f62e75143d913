"""One connection between two agents: frames and limits. Never blocks.

Each side begins with its part of the `handshake`. After that it sends frames: a length (4 bytes,
big-endian), a payload of that length, and a tag if the job has a secret.
A long message is sent in parts of `PART_BYTES`, which have the highest bit of the length set, and
the next bit too if more follow. Short messages overtake the parts that wait: a lease must not end
because a heartbeat queues behind a snapshot. Neither the consensus nor the finders depend on the
order of messages.

Until the other side has said `Hello`, its messages must be short; a stranger can neither make this
process allocate memory nor keep a connection for long.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable

from outlast.launch.config.secret import Secret
from outlast.launch.event_loop import EventLoop
from outlast.launch.hosts.replicated.handshake import FIRST_BYTES, Handshake, NotProved
from outlast.launch.hosts.replicated.messages import Message, decode, encode

_LENGTH = struct.Struct(">I")
_PART, _MORE = 1 << 31, 1 << 30
PART_BYTES = 1 << 16
_READ_BYTES = 1 << 18
STRANGER_BYTES = 1 << 16
"""The longest message before the handshake."""
FRAME_BYTES = 1 << 28
"""The longest message: a snapshot of the table."""
QUEUE_BYTES = 1 << 26
"""When more than this waits to be sent, further messages are dropped, and the consensus repeats
them. A single message may be longer.
"""


class Connection:
    """Sends and receives messages over a connected, or connecting, non-blocking socket.

    Args:
        on_closed: called once with the reason when the connection has ended, but not by `close`.
        dials: whether this side has dialed the other; the connection may not be established yet.
    """

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        on_message: Callable[[Connection, Message], None],
        on_closed: Callable[[Connection, str], None],
        secret: Secret | None = None,
        *,
        dials: bool = False,
    ) -> None:
        self.limit = STRANGER_BYTES
        self.not_proved = ""  # why the handshake has failed, if the secrets are not the same
        self._loop = loop
        self._socket = sock
        self._on_message, self._on_closed = on_message, on_closed
        self.connecting = dials
        self._handshake = Handshake(secret, dials=dials)
        self._early: list[bytes] = []  # what waits for the end of the handshake
        self._received = bytearray()
        self._parts = bytearray()  # of a long message that has not arrived whole
        self._to_send = bytearray(self._handshake.to_send)
        self._long: deque[bytes] = deque()  # parts with their headers
        self._long_bytes = 0
        self._events = selectors.EVENT_READ | selectors.EVENT_WRITE
        self.is_open = True
        loop.watch(sock.fileno(), self._events, self._on_ready)

    def send(self, message: Message) -> None:
        """Send a message, unless too much is waiting already."""
        if not self.is_open or len(self._to_send) + self._long_bytes > QUEUE_BYTES:
            return
        self._queue(encode(message))
        if not self.connecting:
            self._write()

    def _queue(self, payload: bytes) -> None:
        if not self._handshake.over:
            self._early.append(payload)
        elif len(payload) <= PART_BYTES:
            self._seal(_LENGTH.pack(len(payload)) + payload)
        else:
            self._queue_parts(payload)

    def _seal(self, frame: bytes) -> None:
        # Here, because the tags count the frames in the order in which they are sent.
        self._to_send += frame
        self._to_send += self._handshake.seal(frame)

    def _queue_parts(self, payload: bytes) -> None:
        for start in range(0, len(payload), PART_BYTES):
            part = payload[start : start + PART_BYTES]
            more = _MORE if start + PART_BYTES < len(payload) else 0
            self._long.append(_LENGTH.pack(len(part) | _PART | more) + part)
        self._long_bytes += len(payload)

    def _next_part(self) -> bool:
        """Puts one part behind the short messages, when these have been sent."""
        if not self._to_send and self._long:
            part = self._long.popleft()
            self._long_bytes -= len(part) - _LENGTH.size
            self._seal(part)
        return bool(self._to_send)

    def close(self) -> None:
        """End the connection; what was not sent yet is lost."""
        if self.is_open:
            self.is_open = False
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()

    def close_when_sent(self) -> None:
        """End the connection once the other side has had a chance to read what was sent."""
        if self.is_open:
            self._write()
        if self.is_open:
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                self.close()

    def _on_ready(self) -> None:
        if self.connecting:
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._end(os.strerror(error).lower())
                return
            self.connecting = False
        self._write()
        if self.is_open:
            self._read()

    def _write(self) -> None:
        try:
            while self._next_part():
                sent = self._socket.send(memoryview(self._to_send)[:_READ_BYTES])
                del self._to_send[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as e:
            self._end(_reason(e))
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._to_send else 0)
        if events != self._events:
            self._events = events
            self._loop.unwatch(self._socket.fileno())
            self._loop.watch(self._socket.fileno(), events, self._on_ready)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES if self._handshake.over else FIRST_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as e:
            self._end(_reason(e))
            return
        if not data:
            self._end("the connection was closed")
            return
        if self.not_proved:
            return  # read only so that the other side can read why before the connection is reset
        self._received += data
        if not self._handshake.over and not self._shake_hands():
            return
        while self.is_open and self._take_frame():
            pass

    def _shake_hands(self) -> bool:
        if not self._handshake.may_go_on(bytes(self._received)):
            self._end(f"it is no outlast agent: it says {bytes(self._received[:40])!r}")
            return False
        while not self._handshake.over:
            wants = self._handshake.wants
            if len(self._received) < wants:
                self._write()
                return False
            data = bytes(self._received[:wants])
            del self._received[:wants]
            try:
                self._to_send += self._handshake.receive(data)
            except NotProved as e:
                self.not_proved, last = e.args
                self._early.clear()
                self._received.clear()
                self._to_send += last
                self.close_when_sent()
                return False
        for payload in self._early:
            self._queue(payload)
        self._early.clear()
        self._write()
        return self.is_open

    def _take_frame(self) -> bool:
        """Takes one frame out of what has arrived; `False` if none has arrived whole."""
        if len(self._received) < _LENGTH.size:
            return False
        (head,) = _LENGTH.unpack_from(self._received)
        size = head & ~(_PART | _MORE)
        whole = size + (len(self._parts) if head & _PART else 0)
        # A single frame has at most a part: until its tag is seen, its length may be forged.
        if size > PART_BYTES or whole > self.limit:
            self._end(f"a message of {whole} bytes is too long")
            return False
        end = _LENGTH.size + size
        tagged = end + self._handshake.tag_bytes
        if len(self._received) < tagged:
            return False
        frame, tag = bytes(self._received[:end]), bytes(self._received[end:tagged])
        del self._received[:tagged]
        if not self._handshake.is_genuine(frame, tag):
            self._end("a message was changed on the way")
            return False
        payload = frame[_LENGTH.size :]
        if head & _PART:
            self._parts += payload
            if head & _MORE:
                return True
            payload, self._parts = bytes(self._parts), bytearray()
        try:
            message = decode(payload)
        except ValueError as e:
            self._end(str(e))
            return False
        self._on_message(self, message)
        return True

    def _end(self, reason: str) -> None:
        if self.is_open:
            self.close()
            self._on_closed(self, reason)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error) or "the connection failed").lower()
