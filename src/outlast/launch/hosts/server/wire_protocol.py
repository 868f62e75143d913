"""The protocol of torch's TCP store, as a server sees it: parses requests, encodes answers."""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from typing import NamedTuple

from outlast.coordination.stores.tcp_client import LENGTH, MAGIC, NUMBER, WORD, Query

# A client that sends more is not torch's: its limits are the same or lower.
MAX_KEY_BYTES = 8 << 10
MAX_VALUE_BYTES = 8 << 20
MAX_KEYS = 128 << 10
MAX_REQUEST_BYTES = 64 << 20

STOP_WAITING = b"\0"
WAIT_CANCELED = b"\1"
READY = b"\0"
NOT_READY = b"\1"

# torch's queues are not served. A take from a queue is a read and a write that depends on it, and
# neither this package nor torch's process groups use them.
_UNSERVED = frozenset({Query.QUEUE_PUSH, Query.QUEUE_POP, Query.QUEUE_LEN})
_LISTS = frozenset({Query.CHECK, Query.WAIT, Query.MULTI_GET, Query.MULTI_SET, Query.ADD_AND_READ})
_KEYLESS = frozenset({Query.GETNUMKEYS, Query.CANCEL_WAIT, Query.LIST_KEYS})
_VALUES = {Query.SET: 1, Query.APPEND: 1, Query.MULTI_SET: 1, Query.COMPARE_SET: 2}
_NUMBERS = frozenset({Query.ADD, Query.BARRIER, Query.ADD_AND_READ})


class MalformedRequest(ValueError):
    """A client sent something that is no request of this protocol."""


class Request(NamedTuple):
    """One request. `values` holds the values in the order in which they were sent."""

    query: Query
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    number: int = 0


class RequestReader:
    """Turns the bytes of one connection into requests, however they are cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._parser = self._requests()
        self._needed = next(self._parser)
        self.validated = False
        self._parsed: list[Request] = []
        self._left = MAX_REQUEST_BYTES

    def feed(self, data: bytes) -> list[Request]:
        """The requests that `data` completes."""
        self._buffer += data
        position = 0
        try:
            while len(self._buffer) - position >= self._needed:
                end = position + self._needed
                piece = bytes(self._buffer[position:end])
                position = end
                self._needed = self._parser.send(piece)
        finally:
            del self._buffer[:position]
        parsed, self._parsed = self._parsed, []
        return parsed

    def _requests(self) -> Generator[int, bytes, None]:
        # Yields the number of bytes that it needs next, and is sent them.
        while True:
            self._left = MAX_REQUEST_BYTES
            code = (yield 1)[0]
            try:
                query = Query(code)
            except ValueError:
                raise MalformedRequest(f"request {code} is unknown") from None
            if query in _UNSERVED:
                raise MalformedRequest(f"{query.name}: torch's queues are not served here")
            if self.validated == (query is Query.VALIDATE):
                raise MalformedRequest(f"{query.name} out of place: VALIDATE comes first, and once")
            if query is Query.VALIDATE:
                if WORD.unpack((yield WORD.size))[0] != MAGIC:
                    raise MalformedRequest("the magic number of torch's store is missing")
                self.validated = True
            elif query is Query.PING:
                nonce = WORD.unpack((yield WORD.size))[0]
                self._parsed.append(Request(query, number=nonce))
            else:
                request = yield from self._arguments(query)
                self._parsed.append(request)

    def _arguments(self, query: Query) -> Generator[int, bytes, Request]:
        if query in _KEYLESS:
            return Request(query)
        count = 1
        if query in _LISTS:
            count = LENGTH.unpack((yield LENGTH.size))[0]
            if count > MAX_KEYS or (query is Query.ADD_AND_READ and count != 2):
                raise MalformedRequest(f"{query.name} of {count} keys")
        keys, values = [], []
        for _ in range(count):
            keys.append((yield from self._text(query)))
            for _ in range(_VALUES.get(query, 0)):
                values.append((yield from self._bytes(query, MAX_VALUE_BYTES)))
        number = NUMBER.unpack((yield NUMBER.size))[0] if query in _NUMBERS else 0
        return Request(query, tuple(keys), tuple(values), number)

    def _text(self, query: Query) -> Generator[int, bytes, str]:
        data = yield from self._bytes(query, MAX_KEY_BYTES)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise MalformedRequest(f"the key of {query.name} is not UTF-8: {data[:64]!r}") from None

    def _bytes(self, query: Query, limit: int) -> Generator[int, bytes, bytes]:
        size = LENGTH.unpack((yield LENGTH.size))[0]
        self._left -= size
        if size > limit or self._left < 0:
            raise MalformedRequest(f"{query.name} with an argument of {size} bytes")
        return (yield size) if size else b""


def encode_number(number: int) -> bytes:
    """The answer to ADD, DELETE_KEY and GETNUMKEYS."""
    try:
        return NUMBER.pack(number)
    except struct.error:
        raise MalformedRequest(f"ADD: the sum {number} has more than 64 bits") from None


def encode_value(value: bytes) -> bytes:
    """The answer to GET and COMPARE_SET."""
    return LENGTH.pack(len(value)) + value


def encode_values(values: Sequence[bytes]) -> bytes:
    """The answer to MULTI_GET."""
    return b"".join(map(encode_value, values))


def encode_keys(keys: Sequence[str]) -> bytes:
    """The answer to LIST_KEYS."""
    return encode_number(len(keys)) + encode_values([key.encode() for key in keys])
