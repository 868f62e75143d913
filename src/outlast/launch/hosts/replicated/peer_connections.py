"""The connections of one agent to all others.

A host dials another when it has something to send and no connection; a connection serves both
directions. Messages to a host that cannot be reached are dropped, because the consensus and the
finders repeat theirs. Connections are given up early when a network fails, so that a new one is
tried soon after it heals: TCP itself would wait longer and longer between its attempts.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
from collections import Counter
from collections.abc import Callable

from outlast.launch.config.secret import Secret
from outlast.launch.event_loop import EventLoop, Timer
from outlast.launch.hosts.replicated.connection import FRAME_BYTES, Connection
from outlast.launch.hosts.replicated.messages import PROTOCOL, Hello, Message, Refused

Address = tuple[str, int]

MAX_STRANGERS = 64
"""The maximum number of incoming connections that have not said who they are. The oldest yields of
the address that has most of them: one program that opens many does not keep other hosts out.
"""
WAITING_MESSAGES = 256
"""How many messages may wait for a connection to be established."""
FIRST_RETRY_S, LAST_RETRY_S = 0.05, 0.5
_SILENT = "it accepts connections but does not say what it is: no outlast agent?"

_log = logging.getLogger(__name__)


class Peer:
    """The other end of a connection that has said who it is."""

    def __init__(self, connection: Connection, hello: Hello) -> None:
        self.connection = connection
        self.host = hello.host

    def send(self, message: Message) -> None:
        self.connection.send(message)


class _Dial:
    """An address to which this host sends."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.peer: Peer | None = None
        self.waiting: list[tuple[str | None, Message]] = []  # each with the host that it is for
        self.retry_s = FIRST_RETRY_S
        self.not_before = 0.0
        self.failure = ""
        self.differs = False  # it failed because the other side has another secret, run or version


class PeerConnections:
    """Dials, accepts, and keeps connections.

    Args:
        patience_s: how long a network may be silent before a connection is given up.
        on_refused: called when a host was refused, with a line that says which and why.
    """

    def __init__(
        self,
        loop: EventLoop,
        hello: Hello,
        listener: socket.socket,
        patience_s: float,
        on_message: Callable[[Peer, Message], None],
        on_refused: Callable[[str], None],
        secret: Secret | None = None,
    ) -> None:
        self._loop, self._hello, self._listener = loop, hello, listener
        self._patience_s, self._on_message, self._on_refused = patience_s, on_message, on_refused
        self._secret = secret
        self._dials: dict[Address, _Dial] = {}
        self._strangers: dict[Connection, Timer] = {}
        self._came_from: dict[Connection, str] = {}  # the address of each incoming stranger
        self._peers: dict[Connection, Peer] = {}
        self._by_host: dict[str, list[Peer]] = {}
        listener.setblocking(False)
        self._listen()

    def send(self, host: str, address: Address | None, message: Message) -> None:
        """Send to a host over any connection to it; dial `address` if there is none.

        If another agent listens there by now, the message is dropped. That agent may be the
        successor of `host` after a loss of power, and what concerns one of them, its removal from
        the group for example, does not concern the other.
        """
        peers = self._by_host.get(host)
        if peers:
            peers[-1].send(message)
        elif address is not None:
            self._send_to(address, host, message)

    def send_to(self, address: Address, message: Message) -> None:
        """Send to the agent that listens on `address`, whichever that is."""
        self._send_to(address, None, message)

    def _send_to(self, address: Address, host: str | None, message: Message) -> None:
        dial = self._dials.setdefault(address, _Dial())
        if dial.peer is not None:
            if host in (None, dial.peer.host.id):
                dial.peer.send(message)
            return
        if len(dial.waiting) < WAITING_MESSAGES:
            dial.waiting.append((host, message))
        if dial.connection is None and self._loop.clock.now() >= dial.not_before:
            self._connect(address, dial)

    def failure(self, address: Address) -> str:
        """Why the last attempt to reach `address` failed; empty if it did not."""
        dial = self._dials.get(address)
        return "" if dial is None else dial.failure

    def differs(self, address: Address | None) -> bool:
        """Whether the last attempt to reach `address` failed because the agent there has another
        secret than this one, or one of the two has none; or because it is of another run or
        version.
        """
        dial = None if address is None else self._dials.get(address)
        return dial is not None and dial.differs

    def close(self) -> None:
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        for timer in self._strangers.values():
            timer.cancel()
        dialed = [dial.connection for dial in self._dials.values() if dial.connection is not None]
        for connection in {*self._strangers, *self._peers, *dialed}:
            connection.close()
        self._strangers.clear()
        self._came_from.clear()
        self._peers.clear()
        self._by_host.clear()
        self._dials.clear()

    # ------------------------------------------------------------------------- connections

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.watch(self._listener.fileno(), selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            sock, remote = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as e:
            # No descriptor is left. The listener stays readable: watched, it would keep the loop
            # busy until others are closed.
            _log.warning("no agent can connect for now: %s", e.strerror)
            self._loop.unwatch(self._listener.fileno())
            self._loop.call_later(LAST_RETRY_S, self._listen)
            return
        self._prepare(sock)
        connection = Connection(self._loop, sock, self._from_stranger, self._ended, self._secret)
        if len(self._came_from) >= MAX_STRANGERS:
            most, _ = Counter(self._came_from.values()).most_common(1)[0]
            oldest = next(c for c, came in self._came_from.items() if came == most)
            self._drop(oldest, "too many connections at once")
        self._came_from[connection] = str(remote[0])
        self._await_hello(connection)

    def _connect(self, address: Address, dial: _Dial) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        self._prepare(sock)
        # From this host's own address, which is the one that others know; not for an endpoint of
        # another family, or of loopback.
        if family == socket.AF_INET and ":" not in self._hello.host.address:
            with contextlib.suppress(OSError):
                sock.bind((self._hello.host.address, 0))
        try:
            sock.connect(address)
        except BlockingIOError:
            pass
        except OSError as e:  # no route
            sock.close()
            self._failed(dial, (e.strerror or str(e)).lower())
            return
        dial.connection = Connection(
            self._loop, sock, self._from_stranger, self._ended, self._secret, dials=True
        )
        dial.connection.send(self._hello)
        self._await_hello(dial.connection)

    def _prepare(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(self._patience_s * 1000))
        )

    def _await_hello(self, connection: Connection) -> None:
        def late() -> None:
            self._drop(connection, "it does not answer" if connection.connecting else _SILENT)

        self._strangers[connection] = self._loop.call_later(self._patience_s, late)

    def _drop(self, connection: Connection, reason: str) -> None:
        connection.close()
        self._ended(connection, reason)

    def _from_stranger(self, connection: Connection, message: Message) -> None:
        peer = self._peers.get(connection)
        if peer is not None:
            self._on_message(peer, message)
            return
        dial = self._dial_of(connection)
        refused = message if isinstance(message, Refused) else None
        if isinstance(message, Hello):
            refused = self._refusal(message)
            if refused is not None and dial is None:
                self._on_refused(refused.reason)
                connection.send(refused)
                connection.close_when_sent()
                return
        if refused is not None and dial is not None:
            self._drop(connection, refused.reason)
            dial.differs = True
            return
        if not isinstance(message, Hello):
            self._drop(connection, "it does not say what it is")
            return
        self._strangers.pop(connection).cancel()
        self._came_from.pop(connection, None)
        connection.limit = FRAME_BYTES
        peer = self._peers[connection] = Peer(connection, message)
        self._by_host.setdefault(message.host.id, []).append(peer)
        if dial is None:
            connection.send(self._hello)
            return
        dial.peer, dial.retry_s, dial.failure = peer, FIRST_RETRY_S, ""
        dial.differs = False
        waiting, dial.waiting = dial.waiting, []
        for host, each in waiting:
            if host in (None, peer.host.id):
                peer.send(each)

    def _refusal(self, theirs: Hello) -> Refused | None:
        mine = self._hello
        if theirs.protocol != PROTOCOL:
            setting = "outlast version"
            versions = [h.settings.get(setting, "another") for h in (mine.host, theirs.host)]
            return Refused(
                f"{setting}: {mine.host.name} has {versions[0]}, {theirs.host.name} has "
                f"{versions[1]}"
            )
        if theirs.run_id != mine.run_id:
            # A stranger does not learn the id that would let it in.
            return Refused(
                f"--rdzv-id: {theirs.host.name} asks for the run {theirs.run_id!r}, and "
                f"{mine.host.name} was started for another one"
            )
        return None

    def _dial_of(self, connection: Connection) -> _Dial | None:
        return next((d for d in self._dials.values() if d.connection is connection), None)

    def _ended(self, connection: Connection, reason: str) -> None:
        timer = self._strangers.pop(connection, None)
        if timer is not None:
            timer.cancel()
        came_from = self._came_from.pop(connection, None)
        if came_from is not None and connection.not_proved:
            self._on_refused(f"refused a connection from {came_from}: {connection.not_proved}")
        dial = self._dial_of(connection)
        if dial is not None:
            self._failed(dial, connection.not_proved or reason)
            dial.differs = bool(connection.not_proved)
        peer = self._peers.pop(connection, None)
        if peer is not None:
            others = self._by_host[peer.host.id]
            others.remove(peer)
            if not others:
                del self._by_host[peer.host.id]

    def _failed(self, dial: _Dial, reason: str) -> None:
        dial.connection = dial.peer = None
        dial.differs = False
        dial.waiting.clear()
        dial.failure = reason
        dial.not_before = self._loop.clock.now() + dial.retry_s
        dial.retry_s = min(2 * dial.retry_s, LAST_RETRY_S)
