"""Stores that the program has opened before the wrapped call: among the arguments, or global in
the main program.

So do Megatron and the examples of nvidia-resiliency-ext: rank 0 serves a `TCPStore`, and each
iteration makes its process group with a prefix of it. Such a store outlives the iterations, yet its
client never connects again, neither to a server that has died with its process and was started anew
by the replacement (which waits there for all its clients, before it asks to join), nor after the
wait for a key of a lost rank was ended, which takes a shutdown of the connection.

The client is a C++ object that keeps nothing about its connection but the descriptor. So another
connection is made, which greets the server and is counted as one of its workers, and the first
one's number is given to it. Not by torch, whose client asks the name server for the name of each
address, for its log: where no name server answers, that takes five seconds. This is done in the
function's thread, when the function has been left and the process groups are released: nothing else
uses the store then. What the program has closed is left alone: nothing here holds its stores, whose
server may begin again on the same port.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed

from outlast.coordination.stores.tcp_client import greet, join_workers
from outlast.errors import StoreError
from outlast.system.parallel import start_thread
from outlast.system.sockets import awaited, peer, shut_down, socket_inode, socket_inodes

log = logging.getLogger("outlast.inprocess")
dist: Any = torch.distributed  # its stubs do not export the stores

_PATIENCE_S = 2.0
"""How long the function waits for a store. The server of a replacement has answered by then: it has
waited for this client before the replacement asked to join."""
_ANSWER_S = 15.0
"""How long a server that has taken a connection may take to answer: torch's, too, first asks the
name server for the name of the client."""
_PAUSE_MS = 100
_MOST = 1000
"""A larger tuple, list or dict is data: to look for stores in it would take seconds."""


@dataclasses.dataclass
class _Client:
    host: str
    port: int
    addresses: frozenset[tuple[str, int]]
    descriptor: int
    inode: int
    lost = False  # it has no connection, nor another one
    renewed: socket.socket | None = None  # the other one

    def __str__(self) -> str:
        return f"the program's store at {self.host}:{self.port}"


class ProgramStores:
    """The TCP stores among these arguments, also below a `PrefixStore`, in a tuple, list or dict;
    and the globals of the main program. Made before the call.
    """

    def __init__(self, *arguments: Any) -> None:
        self._function_thread = threading.get_native_id()
        self._watch: threading.Thread | None = None
        self._is_there = False  # a server has taken the connection, and has not answered yet
        self._clients: dict[int, _Client] = {}  # by descriptor
        found = (*arguments, *vars(sys.modules["__main__"]).values())
        for store in _tcp_stores(found, within=2):
            place, addresses = (store.host, store.port), _addresses(store.host, store.port)
            for descriptor, inode in socket_inodes().items():
                if peer(descriptor) in addresses:
                    self._clients[descriptor] = _Client(*place, addresses, descriptor, inode)

    def end_wait(self) -> None:
        """Ends a wait of the function's thread in one of the stores. Called in another thread."""
        client = self._clients and self._clients.get(awaited(self._function_thread) or 0)
        if client:
            shut_down(client.descriptor, client.inode)

    def watch(self) -> None:
        """Begins to connect again, in another thread, what has lost its connection, or loses it
        until `replace`: other ranks notice the end of a process before all its sockets are closed.
        """
        if self._watch is not None and not self._watch.is_alive():
            self.close()
        if self._clients and self._watch is None:
            self._stop = os.eventfd(0, os.EFD_CLOEXEC)
            self._watch = start_thread("outlast-stores", self._connect)

    def _connect(self) -> None:
        poll, halt, stop = select.poll(), select.poll(), self._stop
        poll.register(stop, select.POLLIN)
        halt.register(stop, select.POLLIN)
        watched = dict(self._clients)
        for descriptor in watched:
            poll.register(descriptor, select.POLLRDHUP)
        while True:
            ready = dict(poll.poll())
            for descriptor in ready.keys() - {stop}:
                client = watched[descriptor]
                open_still = socket_inode(client.descriptor) == client.inode
                if open_still and not self._connect_again(client):
                    if halt.poll(_PAUSE_MS):
                        return
                    continue  # once more
                poll.unregister(descriptor)
                if open_still and client.renewed is not None:
                    # This server may be lost too: that of a replacement that has not joined yet.
                    watched[client.renewed.fileno()] = client
                    poll.register(client.renewed, select.POLLRDHUP)
            if stop in ready:
                return

    def _connect_again(self, client: _Client) -> bool:
        client.lost = True
        # Its server may have moved with its name.
        for address in (*client.addresses, *_addresses(client.host, client.port)):
            with contextlib.ExitStack() as stack:
                try:
                    connection = socket.create_connection(address, _PATIENCE_S)
                    stack.callback(connection.close)
                    connection.settimeout(_ANSWER_S)
                    self._is_there = True
                    greet(connection)
                    join_workers(connection)
                except (OSError, EOFError, StoreError) as e:
                    log.debug("%s cannot be reached yet: %s", client, e)
                    continue
                finally:
                    self._is_there = False
                stack.pop_all()
                connection.settimeout(None)
                if client.renewed is not None:  # that server is lost too
                    client.renewed.close()
                client.lost, client.renewed = False, connection
                return True
        return False

    def replace(self) -> None:
        """Gives the stores their new connections. Called before the function is entered."""
        ended = self.close()
        lost = {str(client) for client in self._clients.values() if client.lost}
        if lost:
            log.warning("%s has no server any more", ", ".join(sorted(lost)))
        for client in self._clients.values() if ended else ():
            if client.renewed is not None and socket_inode(client.descriptor) == client.inode:
                os.dup2(client.renewed.fileno(), client.descriptor, inheritable=False)
                client.inode = socket_inode(client.descriptor) or 0
            if client.renewed is not None:
                client.renewed.close()
                client.renewed = None

    def close(self) -> bool:
        """Ends the thread; returns whether it has ended: it may still wait for a server."""
        if self._watch is not None:
            os.eventfd_write(self._stop, 1)
            self._watch.join(_PATIENCE_S)
            if self._is_there:
                self._watch.join(_ANSWER_S)
            if self._watch.is_alive():
                return False
            self._watch = None
            os.close(self._stop)
        return True


def _tcp_stores(arguments: Iterable[Any], within: int) -> Iterator[Any]:
    for argument in arguments if dist.is_available() else ():
        while isinstance(argument, dist.PrefixStore):
            argument = argument.underlying_store
        if isinstance(argument, dist.TCPStore):
            yield argument
        elif within and isinstance(argument, tuple | list | dict) and len(argument) <= _MOST:
            inner = dict.values(argument) if isinstance(argument, dict) else argument
            yield from _tcp_stores(inner, within - 1)


def _addresses(host: str, port: int) -> frozenset[tuple[str, int]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return frozenset()
    return frozenset((str(each[4][0]), port) for each in found)
