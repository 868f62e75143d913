"""Serves the store of all hosts to the workers of one, in the protocol of torch's TCP store.

Workers use torch's own client, or `coordination.stores.tcp_client`, as with any other store. The
server runs in the event loop of the host service. It listens on loopback only: torch's protocol
knows no authentication, and the workers of each host have a server of their own. Each request
becomes operations on the store of all hosts (`client_connection`), which are combined on the way
(`combining`). Keys that concern one host only stay in its server, and no other host sees them.
Heartbeats are such keys: the monitor processes of a host watch each other, and the agents' leases
tell the hosts about each other.

Differences from torch's server: a wait ends only when its key exists or has existed, and for no
other reason; torch's queues are not served; and a value that was set without an answer (SET,
APPEND) may take as long to be seen on other hosts as the store takes to answer.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import selectors
import socket
from collections.abc import Callable, Hashable
from functools import partial
from typing import cast

from msgspec import structs

from outlast.coordination.replicated.operations import (
    BATCH,
    WAIT,
    Failed,
    Operation,
    Result,
    Single,
)
from outlast.errors import LaunchError
from outlast.launch.event_loop import EventLoop
from outlast.launch.hosts.server.client_connection import ClientConnection
from outlast.launch.hosts.server.combining import Done, Stores, Upstream

LOOPBACK = "127.0.0.1"
"""Where every host serves its own workers."""
_BACKLOG = 4096
_ACCEPTED = 64  # at a time, so that a flood of connections does not hold up the loop
_TO_VALIDATE_S = 30.0  # how long a client may take for its first request
_FULL_PAUSE_S = 0.5  # when the process has no descriptors left
_FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_log = logging.getLogger(__name__)


class StoreServer:
    """Listens for workers, and performs what they request. Not thread-safe: used from `loop`.

    It also is the `Upstream` of this host's agent, for the keys of its workers. A `LaunchError` if
    this host has no loopback address.
    """

    def __init__(self, loop: EventLoop, upstream: Upstream) -> None:
        self._loop = loop
        self._stores = Stores(upstream, lambda call: loop.call_later(0.0, call))
        self._connections: set[ClientConnection] = set()
        self._own: dict[int, tuple[Done, Callable[[], None]]] = {}  # of the agent, with their ends
        self._numbers = itertools.count()
        try:
            self._listener = socket.create_server((LOOPBACK, 0), backlog=_BACKLOG)
        except OSError as e:
            raise LaunchError(f"the store cannot be served at {LOOPBACK}: {e.strerror}") from e
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.namespace = self._namespace(0)
        loop.watch(self._listener.fileno(), selectors.EVENT_READ, self._accept)

    @staticmethod
    def _namespace(attempt: int) -> str:
        return f"w/{attempt}/"

    def new_attempt(self, attempt: int) -> None:
        """Gives later clients the keys of this attempt; closes all connections, which are those of
        the workers of the attempt before.
        """
        self._close_connections("the workers are started again")
        self._stores.forget_own(self.namespace)
        self.namespace = self._namespace(attempt)

    def fail(self, reason: str) -> None:
        """Stops serving: this host must not act any more. Clients get a `StoreError`."""
        if self._listener.fileno() >= 0:
            self._loop.unwatch(self._listener.fileno())
            self._listener.close()
        self._close_connections(reason)
        own, self._own = self._own, {}
        for done, end in own.values():
            end()
            done(Failed(reason))

    def close(self) -> None:
        self.fail("the store server ends")

    def submit(self, operation: Operation, done: Done) -> Hashable:
        """Performs an operation of the agent in the namespace of its workers, after all that they
        have sent by now: what is in the sockets is read before the timers of the loop are due.
        """
        number = next(self._numbers)
        if self._listener.fileno() < 0:
            done(Failed("the store server has ended"))
            return number
        # The "/" is of torch's client. The parts of a batch leave together, as they are sent.
        parts = [
            structs.replace(part, key=f"{self.namespace}/{part.key}")
            for part in operation.operations or (operation,)
        ]
        results: dict[int, Single] = {}
        self._own[number] = done, lambda: None

        def begin() -> None:
            if number not in self._own:
                return
            if operation.name == WAIT:
                end = self._stores.wait(parts[0].key, finish)
                if number in self._own:
                    self._own[number] = done, end
            elif operation.name == BATCH:
                for index, part in enumerate(parts):
                    self._stores.submit(self, part, partial(gather, index))
            else:
                self._stores.submit(self, parts[0], finish)

        def gather(index: int, result: Result) -> None:
            results[index] = cast(Single, result)
            if len(results) == len(parts):
                finish([results[index] for index in range(len(parts))])

        def finish(result: Result) -> None:
            if number in self._own:
                del self._own[number]
                done(result)

        self._loop.call_later(0.0, begin)
        return number

    def cancel(self, handle: Hashable) -> None:
        assert isinstance(handle, int)
        if handle in self._own:
            self._own.pop(handle)[1]()

    def _close_connections(self, reason: str) -> None:
        for connection in list(self._connections):
            connection.close(reason)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as e:
                if e.errno not in _FULL:
                    raise
                self._pause(e)
                return
            connection.setblocking(False)
            with contextlib.suppress(OSError):  # reset already
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client = ClientConnection(
                self._loop, connection, self._stores, self.namespace, self._closed
            )
            self._connections.add(client)
            self._loop.call_later(_TO_VALIDATE_S, partial(self._expect, client))

    def _pause(self, error: OSError) -> None:
        # The listener stays readable: watched, it would keep the loop busy until others close.
        _log.warning("the store server cannot accept connections for now: %s", error.strerror)
        self._loop.unwatch(self._listener.fileno())

        def resume() -> None:
            if self._listener.fileno() >= 0:
                self._loop.watch(self._listener.fileno(), selectors.EVENT_READ, self._accept)

        self._loop.call_later(_FULL_PAUSE_S, resume)

    def _expect(self, client: ClientConnection) -> None:
        if not client.validated:
            client.close(f"sent no request within {_TO_VALIDATE_S} s")

    def _closed(self, client: ClientConnection, reason: str) -> None:
        self._connections.discard(client)
        if reason:
            _log.debug("the store server has closed a connection: %s", reason)
