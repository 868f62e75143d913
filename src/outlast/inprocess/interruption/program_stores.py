"""Stores that the program has opened before the wrapped call: among the arguments, or global in
the main program.

So do Megatron and the examples of nvidia-resiliency-ext: rank 0 serves a `TCPStore`, and each
iteration makes its process group with a prefix of it. Such a store outlives the iterations, yet its
client never connects again, neither to a server that has died with its process and was started anew
by the replacement (which waits there for all its clients, before it asks to join), nor after the
wait for a key of a lost rank was ended, which takes a shutdown of the connection.

The client is a C++ object that keeps nothing about its connection but the descriptor. So another
client is made, which greets the server and counts as one of its workers, and the first one's number
is given to its connection. This is done in the function's thread, when the function has been left
and the process groups are released: nothing else uses the store then. The program holds it, so its
descriptor is not closed meanwhile.
"""

from __future__ import annotations

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

from outlast.system.sockets import awaited, peer, shut_down, socket_inode, socket_inodes

log = logging.getLogger("outlast.inprocess")
dist: Any = torch.distributed  # its stubs do not export the stores

_PATIENCE_S = 2.0
"""How long the function waits for a store. The server of a replacement has answered by then: it has
waited for this client before the replacement asked to join."""


@dataclasses.dataclass
class _Client:
    store: Any
    addresses: frozenset[tuple[str, int]]
    descriptor: int
    inode: int
    renewed: tuple[Any, int] | None = None  # the other client, and the descriptor of that

    def __str__(self) -> str:
        return f"the program's store at {self.store.host}:{self.store.port}"


class ProgramStores:
    """The TCP stores among these arguments, also below a `PrefixStore`, in a tuple or a dict; and
    the globals of the main program. Made before the call.
    """

    def __init__(self, *arguments: Any) -> None:
        self._function_thread = threading.get_native_id()
        self._watch: threading.Thread | None = None
        self._clients: dict[int, _Client] = {}  # by descriptor
        found = (*arguments, *vars(sys.modules["__main__"]).values())
        for store in _tcp_stores(found, within=2):
            addresses = _addresses(store)
            for descriptor, inode in socket_inodes().items():
                if peer(descriptor) in addresses:
                    self._clients[descriptor] = _Client(store, addresses, descriptor, inode)

    def end_wait(self) -> None:
        """Ends a wait of the function's thread in one of the stores. Called in another thread."""
        client = self._clients and self._clients.get(awaited(self._function_thread) or 0)
        if client:
            shut_down(client.descriptor, client.inode)

    def watch(self) -> None:
        """Begins to connect again, in another thread, what has lost its connection, or loses it
        until `replace`: other ranks notice the end of a process before all its sockets are closed.
        """
        if self._clients and self._watch is None:
            self._stop = os.eventfd(0, os.EFD_CLOEXEC)
            self._watch = threading.Thread(target=self._connect, name="outlast-stores", daemon=True)
            self._watch.start()

    def _connect(self) -> None:
        poll, stop = select.poll(), self._stop
        poll.register(stop, select.POLLIN)
        for descriptor in self._clients:
            poll.register(descriptor, select.POLLRDHUP)
        while True:
            ready = dict(poll.poll())
            for descriptor in ready.keys() - {stop}:
                poll.unregister(descriptor)
                if socket_inode(descriptor) == self._clients[descriptor].inode:
                    self._connect_again(self._clients[descriptor])
            if stop in ready:
                return

    def _connect_again(self, client: _Client) -> None:
        before, store = set(socket_inodes().values()), client.store
        try:
            # Its server counts it as one of its workers; their number matters to the server only.
            other = dist.TCPStore(store.host, store.port, 1, False, store.timeout)
        except RuntimeError as e:
            log.warning("%s cannot be reached again: %s", client, str(e).partition("\n")[0])
            return
        for descriptor, inode in socket_inodes().items():
            if inode not in before and peer(descriptor) in client.addresses:
                client.renewed = other, descriptor

    def replace(self) -> None:
        """Gives the stores their new connections. Called before the function is entered."""
        if not self.close():
            log.warning("%s has no server any more", ", or ".join(map(str, self._clients.values())))
            return
        for client in self._clients.values():
            if client.renewed is not None and socket_inode(client.descriptor) == client.inode:
                os.dup2(client.renewed[1], client.descriptor, inheritable=False)
                client.inode = socket_inode(client.descriptor) or 0
            client.renewed = None

    def close(self) -> bool:
        """Ends the thread; returns whether it has ended: it may still wait for a server."""
        if self._watch is not None:
            os.eventfd_write(self._stop, 1)
            self._watch.join(_PATIENCE_S)
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
        elif within and isinstance(argument, tuple | dict):
            inner = argument.values() if isinstance(argument, dict) else argument
            yield from _tcp_stores(inner, within - 1)


def _addresses(store: Any) -> frozenset[tuple[str, int]]:
    try:
        found = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_STREAM)
    except OSError:
        return frozenset()
    return frozenset((str(each[4][0]), store.port) for each in found)
