"""One connection to the store server: performs the requests of a client in their order."""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from outlast.coordination.replicated.operations import Failed, Keys, Operation, Result
from outlast.coordination.stores.tcp_client import WORD, Query
from outlast.launch.event_loop import EventLoop
from outlast.launch.hosts.server import wire_protocol as wire
from outlast.launch.hosts.server.combining import Stores
from outlast.launch.hosts.server.wire_protocol import MalformedRequest, Request

_RECEIVED_BYTES = 256 << 10  # at a time
# A client gets no further while it leaves this much of its answers unread, or while this many of
# its requests are not performed yet.
_UNREAD_BYTES = 1 << 20
_UNPERFORMED = 256
# A barrier of torch's client (since 2.12) wakes its waiters with a key that no client can name:
# the keys of torch's clients begin with "/", except for "init/".
_REACHED = "reached:"


class ClientConnection:
    """Reads requests, passes them to the stores, and sends the answers.

    A request with an answer is performed alone: the next one is begun when it has been answered.
    Those without an answer (SET, APPEND, MULTI_SET) do not hold up the next; the combiner keeps the
    order. During a wait, only its cancellation is looked at.

    Args:
        namespace: stands before each key of the client.
        closed: called when the connection has been closed, for any reason, which it gets: empty if
            the client has closed it.
    """

    def __init__(
        self,
        loop: EventLoop,
        connection: socket.socket,
        stores: Stores,
        namespace: str,
        closed: Callable[[ClientConnection, str], None],
    ) -> None:
        self._loop, self._socket, self._stores = loop, connection, stores
        self._namespace, self._closed = namespace, closed
        self._reader = wire.RequestReader()
        self._requests: deque[Request] = deque()
        self._unsent = bytearray()
        self._unperformed = 0  # requests without an answer that are in flight
        self._answering = False  # a request with an answer is in flight
        self._waiting = False  # and it is a wait
        self._waits: list[Callable[[], None]] = []  # they end that wait
        self._watched = selectors.EVENT_READ
        self.open = True
        loop.watch(connection.fileno(), self._watched, self._on_ready)

    @property
    def validated(self) -> bool:
        return self._reader.validated

    def close(self, reason: str) -> None:
        """Closes the connection and ends its waits. What the client has sent is still performed."""
        if not self.open:
            return
        self.open = False
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()
        self._end_wait()
        self._closed(self, reason)

    # ------------------------------------------------------------------ bytes
    def _on_ready(self) -> None:
        try:
            if self._watched & selectors.EVENT_WRITE:
                self._send_unsent()
            if self._watched & selectors.EVENT_READ:
                self._receive()
        except OSError:  # the client has reset the connection
            self.close("")
        except MalformedRequest as e:
            self.close(str(e))
        self._proceed()

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_RECEIVED_BYTES)
        except BlockingIOError:  # only writable
            return
        if not data:
            self.close("")
            return
        self._requests.extend(self._reader.feed(data))

    def _send(self, answer: bytes) -> None:
        self._unsent += answer
        try:
            self._send_unsent()
        except OSError:
            self.close("")

    def _send_unsent(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return

    def _proceed(self) -> None:
        """Begins the requests that may begin, and watches for what may come next."""
        while self.open and self._requests and self._may_begin(self._requests[0]):
            self._begin(self._requests.popleft())
        if not self.open:
            return
        # Reading goes on during a wait, for its cancellation and for the end of the connection.
        events = selectors.EVENT_READ if len(self._requests) < _UNPERFORMED else 0
        events |= selectors.EVENT_WRITE if self._unsent else 0
        if events != self._watched:
            self._loop.unwatch(self._socket.fileno())
            self._watched = events
            if events:
                self._loop.watch(self._socket.fileno(), events, self._on_ready)

    def _may_begin(self, request: Request) -> bool:
        if self._answering:
            return self._waiting and request.query is Query.CANCEL_WAIT
        if request.query in (Query.WAIT, Query.AWAIT) and self._unperformed:
            return False  # only then is the wait known to come after what precedes it
        return self._unperformed < _UNPERFORMED and len(self._unsent) < _UNREAD_BYTES

    # ------------------------------------------------------------------ requests
    def _begin(self, request: Request) -> None:
        keys = [self._namespace + key for key in request.keys]
        match request.query:
            case Query.PING:
                self._send(WORD.pack(request.number))
            case Query.CANCEL_WAIT:
                self._end_wait()
                self._send(wire.WAIT_CANCELED)
            case Query.SET | Query.MULTI_SET:
                for key, value in zip(keys, request.values, strict=True):
                    self._perform_unanswered(Operation("put", key, value))
            case Query.APPEND:
                self._perform_unanswered(Operation("append", keys[0], request.values[0]))
            case Query.COMPARE_SET:
                expected, value = request.values
                self._perform(
                    [Operation("compare_set", keys[0], value, expected=expected)],
                    # For an absent key with another expectation, torch's server answers with that.
                    lambda held: wire.encode_value(_bytes(held[0], expected)),
                )
            case Query.GET | Query.MULTI_GET:
                encode = wire.encode_values if request.query is Query.MULTI_GET else _only_value
                self._perform(
                    [Operation("read", key) for key in keys],
                    lambda values: encode([_bytes(value, b"") for value in values]),
                )
            case Query.ADD:
                self._perform([Operation("add", keys[0], amount=request.number)], _number)
            case Query.ADD_AND_READ:
                self._perform(
                    [Operation("add", keys[0], amount=request.number), Operation("read", keys[1])],
                    lambda found: _number(found) + _value(found[1:]),
                )
            case Query.CHECK:
                self._perform(
                    [Operation("check", key) for key in keys],
                    lambda found: wire.READY if all(found) else wire.NOT_READY,
                )
            case Query.DELETE_KEY:
                self._perform([Operation("delete", keys[0])], _number)
            case Query.GETNUMKEYS:
                self._perform(
                    [Operation("keys", self._namespace)],
                    lambda found: wire.encode_number(len(self._names(found))),
                )
            case Query.LIST_KEYS:
                self._perform(
                    [Operation("keys", self._namespace)],
                    lambda found: wire.encode_keys(self._names(found)),
                )
            case Query.WAIT:
                self._wait(keys)
            case Query.AWAIT:
                self._await(keys[0])
            case Query.BARRIER:
                self._barrier(keys[0], self._namespace + _REACHED + request.keys[0], request.number)

    def _perform_unanswered(self, operation: Operation) -> None:
        self._unperformed += 1
        self._stores.submit(self, operation, self._performed)

    def _performed(self, result: Result) -> None:
        self._unperformed -= 1
        if isinstance(result, Failed):
            self.close(result.reason)
        self._proceed()

    def _perform(
        self, operations: Sequence[Operation], encode: Callable[[list[Result]], bytes]
    ) -> None:
        if not operations:  # without a call, so that many such requests are no deep recursion
            self._send(encode([]))
            return
        self._answering = True
        results: list[Result] = []

        def done(result: Result) -> None:
            results.append(result)
            if len(results) == len(operations):
                self._answer(results, encode)

        for operation in operations:
            self._stores.submit(self, operation, done)

    def _answer(self, results: list[Result], encode: Callable[[list[Result]], bytes]) -> None:
        self._answering = False
        failed = next((result for result in results if isinstance(result, Failed)), None)
        if failed is not None:
            self.close(failed.reason)
        elif self.open:
            try:
                self._send(encode(results))
            except MalformedRequest as e:
                self.close(str(e))
        self._proceed()

    def _names(self, results: list[Result]) -> list[str]:
        assert isinstance(results[0], Keys)
        names = [key.removeprefix(self._namespace) for key in results[0].names]
        return [name for name in names if not name.startswith(_REACHED)]

    # ------------------------------------------------------------------ waits
    def _wait(self, keys: Sequence[str]) -> None:
        """Answers when each of the keys has existed, not necessarily all at the same time."""
        self._answering = self._waiting = True
        missing = set(keys)
        self._waits = [
            self._stores.wait(key, partial(self._found, missing, key)) for key in missing
        ]
        if not missing:
            self._waited()

    def _found(self, missing: set[str], key: str, result: Result) -> None:
        if isinstance(result, Failed):
            self.close(result.reason)
            return
        missing.discard(key)
        if not missing:
            self._waited()
            self._proceed()

    def _waited(self) -> None:
        self._answering = self._waiting = False
        self._waits = []
        self._send(wire.STOP_WAITING)

    def _await(self, key: str) -> None:
        """Answers with the value of a key, when it exists."""
        self._answering = self._waiting = True
        self._waits = [self._stores.wait(key, self._awaited)]

    def _awaited(self, result: Result) -> None:
        self._waits, self._waiting = [], False
        self._answer([result], _value)

    def _end_wait(self) -> None:
        for end in self._waits:
            end()
        self._waits = []
        if self._waiting:
            self._answering = self._waiting = False

    def _barrier(self, key: str, reached: str, size: int) -> None:
        self._answering = True

        def counted(result: Result) -> None:
            if isinstance(result, Failed):
                self.close(result.reason)
            elif isinstance(result, int) and result >= size:
                self._stores.submit(self, Operation("put", reached, b"1"), lambda _: None)
            if self.open:
                self._wait([reached])
                self._proceed()

        self._stores.submit(self, Operation("add", key, amount=1), counted)


def _bytes(result: Result, default: bytes) -> bytes:
    return result if isinstance(result, bytes) else default


def _only_value(values: Sequence[bytes]) -> bytes:
    return wire.encode_value(values[0])


def _value(results: list[Result]) -> bytes:
    return _only_value([_bytes(results[0], b"")])


def _number(results: list[Result]) -> bytes:
    assert isinstance(results[0], int)
    return wire.encode_number(results[0])
