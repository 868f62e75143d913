"""The network side of a keeper: receives copies from other hosts, and gives them to restores.

A connection asks for one thing, in its first frame:

    offer   a rank's keeper sends a snapshot: description, bytes, checksums; the copy is held once
            the checksums of what arrived are equal
    fetch   a rank that lost its memory asks for the copy of a save and a rank, and verifies it
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any, cast

from outlast.async_checkpoint.peer_copies.connection import Connection, ConnectionRefused, listen
from outlast.async_checkpoint.peer_copies.content import (
    HeldCopies,
    HeldCopy,
    available_bytes,
    check_description,
    receive_copy,
    send_content,
)
from outlast.async_checkpoint.peer_copies.messages import SentSnapshot
from outlast.errors import CheckpointError
from outlast.system.error_text import describe
from outlast.system.units import size_text

# More connections than a keeper has at any time; others wait to be accepted.
_MAX_CONNECTIONS = 64


class CopyServer:
    """Listens at `address`, for processes that know `token`. `received` is called when a copy is
    complete.
    """

    def __init__(
        self, address: str, token: str, copies: HeldCopies, received: Callable[[HeldCopy], None]
    ) -> None:
        self.address = address
        self._token = token
        self._copies = copies
        self._received = received
        self._connections: set[Connection] = set()
        self._lock = threading.Lock()
        self._free = threading.Semaphore(_MAX_CONNECTIONS)
        self._listener = listen(address)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept_all, name="outlast-accept", daemon=True).start()

    def change_token(self, token: str) -> None:
        """Accepts this token from now on; ends connections that were made with another one."""
        with self._lock:
            changed = token != self._token
            self._token = token
            cut = list(self._connections) if changed else []
        for connection in cut:
            connection.cut()

    def close(self) -> None:
        """Stops listening."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait in `accept`
        self._listener.close()

    def _accept_all(self) -> None:
        while True:
            self._free.acquire()
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(
                target=self._serve, args=(sock,), name="outlast-copy", daemon=True
            ).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            # A client that fails, or is none of ours, is its own problem.
            with sock, contextlib.suppress(OSError, EOFError, ConnectionRefused):
                token = self._token
                connection = Connection.accept(sock, token)
                with self._lock:
                    if token != self._token:
                        return
                    self._connections.add(connection)
                try:
                    self._answer(connection, connection.receive_frame())
                except (CheckpointError, ValueError, KeyError, TypeError) as e:
                    connection.send_frame({"error": describe(e)})
                finally:
                    with self._lock:
                        self._connections.discard(connection)
        finally:
            self._free.release()

    def _answer(self, connection: Connection, asked: dict[str, Any]) -> None:
        if asked["op"] == "offer":
            self._receive(connection, asked)
        elif asked["op"] == "fetch":
            self._give(connection, str(asked["save_id"]), int(asked["rank"]))
        else:
            raise ValueError(f"unknown operation {asked['op']!r}")

    def _receive(self, connection: Connection, offer: dict[str, Any]) -> None:
        snapshot = cast(SentSnapshot, offer["snapshot"])
        size, values_size = offer["size_bytes"], offer["values_bytes"]
        check_description(snapshot, size, values_size)
        self._copies.make_room(snapshot["rank"], snapshot["folder_id"])
        free = available_bytes()
        if free is not None and size + values_size > free:
            raise CheckpointError(
                f"{size_text(size + values_size)} were offered, and only {size_text(free)} of "
                "memory are available"
            )
        connection.send_frame({"ok": True})
        where = f"the snapshot of step {snapshot['step']}"
        copy = receive_copy(connection, offer, lambda: connection.receive_frame()["files"], where)
        self._copies.add(copy)
        self._received(copy)
        connection.send_frame({"ok": True})

    def _give(self, connection: Connection, save_id: str, rank: int) -> None:
        copy = self._copies.find(save_id, rank)
        if copy is None:
            raise CheckpointError(f"there is no copy of rank {rank}'s snapshot of save {save_id}")
        connection.send_frame(
            {
                "snapshot": copy.snapshot,
                "size_bytes": copy.memory.size_bytes,
                "values_bytes": len(copy.values),
            }
        )
        send_content(connection, copy.snapshot, copy.memory.view, copy.values)
