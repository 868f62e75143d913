"""A client of torch's TCP store, in Python: for connections that end while they are in use.

A restart in place ends the connections to the store of the old process groups, and the death of
the rank that serves a store ends all of them. torch's own client then logs a warning with a C++
stack trace for each operation, besides raising an error, and it waits in C++, where no signal
arrives and no other thread can end the wait. This client raises a `StoreError`, logs nothing, is
interrupted by signals, and can be broken off.
"""

from __future__ import annotations

import contextlib
import enum
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from outlast.coordination.stores.store import KeyTimeout
from outlast.errors import StoreError
from outlast.system.processes import readable

T = TypeVar("T")

# torch's protocol (`TCPStoreBackend.hpp`), unchanged from torch 2.6 to 2.13. A request is one byte,
# then its arguments in the machine's byte order: numbers have 8 bytes; keys and values are preceded
# by their length. The first request of a connection is VALIDATE, with a magic number.
MAGIC = 0x3C85F7CE
LENGTH = struct.Struct("=Q")
NUMBER = struct.Struct("=q")
WORD = struct.Struct("=I")

_NONCE = 0x6F75746C
_ONE_KEY = LENGTH.pack(1)
_PRESENT = 0


class Query(enum.IntEnum):
    """The kinds of requests; later versions of torch have more."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    GETNUMKEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18
    # Not torch's: a WAIT for one key, answered with its value. Only the store server of a host
    # knows it, and the next: an ADD to the first of two keys, then a GET of the other.
    AWAIT = 128
    ADD_AND_READ = 129


class TcpClient:
    """Performs the operations of `Store` on one connection, which is opened when it is needed.

    Threads take turns; a wait occupies the connection, so each waiting thread needs its own client.
    `timeout`: how long the server may take to answer a request other than a wait, in seconds.
    `host_server`: whether this is the store server of a host (`outlast.launch.hosts.server`). It
    knows AWAIT and ADD_AND_READ; and a COMPARE_SET that changes nothing wakes no waiters there, so
    one request reads a key. torch's server wakes all of a key, so a read asks twice there.
    """

    host_server = False

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self._connection: socket.socket | None = None
        self.where = f"{host}:{port}"
        self._address = (host, port)
        self._timeout = timeout
        self._unfinished = self._broken = False
        self._turn = threading.Lock()

    def __del__(self) -> None:
        self.close()

    def connect(self, within: float | None = None) -> None:
        """Opens the connection, if it is not open; before other threads use this client. A
        `StoreError` if nothing answers; without a `__cause__`, if no server of torch does.
        `within`: how long that may take, in seconds, if less than an operation.
        """
        timeout = self._timeout
        self._timeout = timeout if within is None else min(within, timeout)
        try:
            self._perform(lambda connection: connection.settimeout(timeout))
        finally:
            self._timeout = timeout

    def put(self, key: str, value: bytes) -> None:
        self._perform(lambda connection: _send(connection, Query.SET, _key(key), _bytes(value)))

    def claim(self, key: str, value: bytes) -> bytes:
        def work(connection: socket.socket) -> bytes:
            found = _compare_set(connection, key, b"", value)
            if found == value and not self.host_server:
                # Wakes the waiters: torch's server that is not based on libuv wakes none at a
                # COMPARE_SET (seen on torch 2.6 to 2.15). A client does not know which one it has.
                _send(connection, Query.APPEND, _key(key), _bytes(b""))
            return found

        return self._perform(work)

    def compare_set(self, key: str, before: bytes, after: bytes) -> bytes:
        """Sets `key` to `after` if it is `before`; its value afterwards, or `before` if absent."""
        return self._perform(lambda connection: _compare_set(connection, key, before, after))

    def read(self, key: str) -> bytes | None:
        return self._perform(lambda connection: self._read(connection, key))

    def wait_for(self, key: str, timeout: float | None) -> bytes:
        deadline = None if timeout is None else time.monotonic() + timeout

        def await_answer(connection: socket.socket) -> None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not readable(connection.fileno(), timeout=left):
                raise KeyTimeout(f"no {key!r} within {timeout} s at {self.where}")

        def work(connection: socket.socket) -> bytes:
            if self.host_server:
                _send(connection, Query.AWAIT, _key(key))
                await_answer(connection)
                return _receive_bytes(connection)
            # Repeated, because torch's server also ends the waits for a key when a claim on it is
            # refused and leaves it absent. It answers the WAIT at once if the key is present. To
            # CHECK before would be one more answer to wake up for, in each wait of each rank.
            value: bytes | None = None
            while value is None:
                _send(connection, Query.WAIT, _ONE_KEY, _key(key))
                await_answer(connection)
                _receive(connection, 1)
                value = _get(connection, key) if _present(connection, (key,)) else None
            return value

        try:
            return self._perform(work)
        except KeyTimeout:
            # A key that is there is found, however short the timeout and however late the answer.
            value = self.read(key)
            if value is None:
                raise
            return value

    def read_all(self, *keys: str) -> list[bytes | None]:
        def work(connection: socket.socket) -> list[bytes | None]:
            found = keys if self.host_server else _present(connection, keys)
            if not found:
                return [None for _ in keys]
            _send(connection, Query.MULTI_GET, LENGTH.pack(len(found)), *map(_key, found))
            values = {key: _receive_bytes(connection) or None for key in found}
            return [values.get(key) for key in keys]

        return self._perform(work)

    def add(self, key: str, amount: int) -> int:
        def work(connection: socket.socket) -> int:
            _send(connection, Query.ADD, _key(key), NUMBER.pack(amount))
            return int(NUMBER.unpack(_receive(connection, NUMBER.size))[0])

        return self._perform(work)

    def add_and_read(self, key: str, amount: int, other: str) -> tuple[int, bytes]:
        def work(connection: socket.socket) -> tuple[int, bytes]:
            amount_and = NUMBER.pack(amount)
            if self.host_server:
                keys = LENGTH.pack(2), _key(key), _key(other)
                _send(connection, Query.ADD_AND_READ, *keys, amount_and)
            else:
                check = _request(Query.CHECK, _ONE_KEY, _key(other))
                connection.sendall(_request(Query.ADD, _key(key), amount_and) + check)
            total = int(NUMBER.unpack(_receive(connection, NUMBER.size))[0])
            if self.host_server:
                return total, _receive_bytes(connection)
            is_present = _receive(connection, 1)[0] == _PRESENT
            return total, (_get(connection, other) or b"") if is_present else b""

        return self._perform(work)

    def append(self, key: str, value: bytes) -> None:
        # A host's server gets it with the next request: whoever adds a fact goes on to read others.
        request = bytes([Query.APPEND]) + _key(key) + _bytes(value)
        more = socket.MSG_MORE if self.host_server else 0
        self._perform(lambda connection: connection.sendall(request, more))

    def delete(self, *keys: str) -> None:
        def work(connection: socket.socket) -> None:
            requests = (bytes([Query.DELETE_KEY]) + _key(key) for key in keys)
            connection.sendall(b"".join(requests))
            _receive(connection, len(keys) * NUMBER.size)

        self._perform(work)

    def break_off(self) -> None:
        """Ends the operation of another thread with a `StoreError`; there can be no further one."""
        # The flag first: an operation that is just opening its connection looks at it afterwards.
        self._broken = True
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):  # it has just been closed
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection. The next operation opens another."""
        # Never the connection of a thread that waits: when that thread looks at the descriptor, it
        # may be another file's, which then never becomes readable, or whose bytes are taken.
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _perform(self, work: Callable[[socket.socket], T]) -> T:
        # An error, a timeout or an interrupt (a signal handler that raises, at any point) leaves
        # `_unfinished` set: the connection may hold a half-read answer, and is not used again.
        with self._turn:
            if self._unfinished:
                TcpClient.close(self)  # this connection, and not those of waits
            self._unfinished = True
            try:
                if self._connection is None:
                    self._connection = self._connected()
                if self._broken:
                    raise EOFError("it was broken off")
                result = work(self._connection)
            except (OSError, EOFError) as e:
                raise StoreError(f"the store at {self.where} cannot be reached: {e}") from e
            self._unfinished = False
            return result

    def _connected(self) -> socket.socket:
        connection = socket.create_connection(self._address, self._timeout)
        try:
            greet(connection)
        except BaseException as e:
            connection.close()
            if isinstance(e, StoreError):
                raise StoreError(f"{self.where} does not answer as a store") from None
            raise
        return connection

    def _read(self, connection: socket.socket, key: str) -> bytes | None:
        if self.host_server:
            return _compared(connection, key)
        return _get(connection, key) if _present(connection, (key,)) else None


class SharedClient(TcpClient):
    """A client for any number of threads, on few connections.

    Operations that the server answers at once share one connection. A wait has a connection to
    itself, since it occupies the connection until the key appears: otherwise one waiter would hold
    up another, forever if the second waits for what the first thread's rank says only after its own
    wait. A wait takes an idle connection, or opens one if there is none, and returns it afterwards:
    where waits never overlap, there are two connections in all.
    """

    def __init__(self, host: str, port: int, timeout: float) -> None:
        super().__init__(host, port, timeout)
        self._idle: list[TcpClient] = []  # taken and returned in one step each, without a lock
        self._waiting: list[TcpClient] = []
        self._no_waits = False

    def wait_for(self, key: str, timeout: float | None) -> bytes:
        try:
            client = self._idle.pop()
        except IndexError:
            value = self.read(key)  # a server that is gone is noticed here at once
            if value is not None:
                return value
            client = TcpClient(*self._address, self._timeout)
            client.host_server = self.host_server
        self._waiting.append(client)
        try:
            if self._no_waits:
                client.break_off()
            return client.wait_for(key, timeout)
        finally:
            self._waiting.remove(client)
            self._idle.append(client)

    def break_off(self) -> None:
        """Ends the waits of other threads with a `StoreError`; there can be no further wait."""
        self._no_waits = True
        for client in tuple(self._waiting):
            client.break_off()

    def close(self) -> None:
        """Closes all connections. No other thread may be waiting: see `TcpClient.close`."""
        super().close()
        for client in self._idle:
            client.close()


def greet(connection: socket.socket) -> None:
    """Greets a server of torch's store. An `OSError` or an `EOFError` if it ends the connection, a
    `StoreError` if it does not answer as one, or not within the timeout of the connection.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _send(connection, Query.VALIDATE, WORD.pack(MAGIC))
    _send(connection, Query.PING, WORD.pack(_NONCE))
    with contextlib.suppress(TimeoutError):
        if _receive(connection, WORD.size) == WORD.pack(_NONCE):
            return
    raise StoreError("it does not answer as a store")


def join_workers(connection: socket.socket) -> None:
    """Counts this client among those for which a server of torch's store may wait when it begins.
    Their number stands under a key without the prefix of the clients' keys.
    """
    _send(connection, Query.ADD, _bytes(b"init/"), NUMBER.pack(1))
    _receive(connection, NUMBER.size)


def _send(connection: socket.socket, request: Query, *arguments: bytes) -> None:
    connection.sendall(_request(request, *arguments))


def _request(request: Query, *arguments: bytes) -> bytes:
    return bytes([request]) + b"".join(arguments)


def _key(key: str) -> bytes:
    return _bytes(b"/" + key.encode())  # the prefix of torch's client: both see the same keys


def _bytes(value: bytes) -> bytes:
    return LENGTH.pack(len(value)) + value


def _compare_set(connection: socket.socket, key: str, before: bytes, after: bytes) -> bytes:
    _send(connection, Query.COMPARE_SET, _key(key), _bytes(before), _bytes(after))
    return _receive_bytes(connection)


def _present(connection: socket.socket, keys: Sequence[str]) -> list[str]:
    connection.sendall(b"".join(_request(Query.CHECK, _ONE_KEY, _key(key)) for key in keys))
    answers = _receive(connection, len(keys))
    return [key for key, answer in zip(keys, answers, strict=True) if answer == _PRESENT]


def _get(connection: socket.socket, key: str) -> bytes | None:
    """The value of a key that was present."""
    _send(connection, Query.GET, _key(key))
    # It is empty, or was deleted after the CHECK: GET does not tell which.
    return _receive_bytes(connection) or _compared(connection, key)


def _compared(connection: socket.socket, key: str) -> bytes | None:
    nobodys = os.urandom(16)  # a comparison with a value that no key has
    value = _compare_set(connection, key, nobodys, nobodys)
    return None if value == nobodys else value


def _receive_bytes(connection: socket.socket) -> bytes:
    return _receive(connection, LENGTH.unpack(_receive(connection, LENGTH.size))[0])


def _receive(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        piece = connection.recv(size - len(received))
        if not piece:
            raise EOFError("the connection was closed")
        received += piece
    return bytes(received)
