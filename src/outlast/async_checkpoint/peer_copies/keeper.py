"""The keeper: a process beside each rank that sends its snapshots to another host's keeper, and
holds the copies that such a keeper has sent.

It is a separate program, without torch and with low priority. It maps the snapshot buffers of the
main process, and uses its own connections: nothing of this passes through the training's process
groups. What it holds survives the main process (`writer/remote.py`): another keeper of this host
takes it over, the one of the replacement process, or one of a rank that has survived.

A connection asks for one thing, in its first frame:

    offer   a rank's keeper sends a snapshot: description, bytes, checksums; the copy is held once
            the checksums of what arrived are equal
    fetch   a rank that lost its memory asks for the copy of a save and a rank, and verifies it
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from outlast.async_checkpoint.peer_copies.transfer import (
    Connection,
    ConnectionRefused,
    Transfer,
    check_described,
    described,
    receive_copy,
    send_content,
)
from outlast.async_checkpoint.writer.handover import SnapshotDescription, StoredSnapshot, take_over
from outlast.async_checkpoint.writer.remote import Call, Service, run
from outlast.errors import CheckpointError
from outlast.system.channel import Channel
from outlast.system.error_text import describe
from outlast.system.parallel import start_thread
from outlast.system.shared_memory import SharedMemory, available_bytes
from outlast.system.sockets import accepted, listen, stop
from outlast.system.units import size_text

_NICE = 10  # below the writer: a checkpoint on storage comes first
# More connections than a keeper has at any time; others wait to be accepted.
_MAX_CONNECTIONS = 64


class Keeper(Service):
    """The keeper process. `config`: `socket` is where it hands its copies over, `sockets` a pattern
    for those of all keepers of this folder and host.

    It holds at most two copies of each rank's snapshots, the older one complete everywhere. A rank
    sends the copy of a save only once the copies of the save before have ended on all ranks, and
    every keeper has released what that made superfluous (`rounds.py`). So a keeper that is sent a
    copy holds one complete copy of that rank, besides the one that is arriving.
    """

    def __init__(self, channel: Channel, config: dict[str, Any]) -> None:
        self._copies: dict[tuple[str, int], StoredSnapshot] = {}  # by save and rank
        self._lock = threading.Lock()
        self._socket = str(config["socket"])
        self._sockets = str(config["sockets"])
        self._server: CopyServer | None = None
        self._token = ""
        self._bytes_per_s = 1.0
        self._transfer = Transfer()
        super().__init__(channel, config)

    def accept(self, request: Call) -> None:
        """See `Service.accept`. Sends in a thread of its own, that `arrange` can call off."""
        if request.method != "send_copy":
            super().accept(request)
            return
        self._transfer = Transfer()
        request.arguments["transfer"] = self._transfer
        start_thread("outlast-send", self.answer, request)

    def explain(self, error: Exception) -> str:
        return str(error) if isinstance(error, CheckpointError) else describe(error)

    def snapshots(self) -> list[StoredSnapshot]:
        """See `Service.snapshots`. Stops sending and listening first."""
        self._transfer.cancel()
        if self._server is not None:
            self._server.close()
        return self.held()

    # ------------------------------------------------------------- called by the main process

    def arrange(self, address: str, token: str, bytes_per_s: float) -> int:
        """A checkpointer begins: the keeper listens at `address`, speaks only with processes that
        know `token`, and sends at most `bytes_per_s`. Once it has answered, with its port, it does
        not complete a copy that it was sending, and it has those of this host's dead ranks.
        """
        # First: the main process may write into its buffers once this is answered.
        self._transfer.cancel()
        self._token, self._bytes_per_s = token, bytes_per_s
        if self._server is not None:
            self._server.close()
        self._server = CopyServer(self, address, token)
        folder, pattern = os.path.split(self._sockets)
        for announced in sorted(Path(folder).glob(pattern)):
            path = announced.with_suffix(".sock")
            for stored in take_over(path)[0] if str(path) != self._socket else ():
                self.add(stored)
        return self._server.port

    def send_copy(
        self,
        snapshot: SnapshotDescription,
        memory: SharedMemory,
        address: str,
        port: int,
        blob: bytes = b"",
        transfer: Transfer | None = None,
    ) -> None:
        """Sends a sealed snapshot, whose pickled values are in `blob`, to the keeper at `address`
        and `port`. The answer comes when the copy is there and verified, or failed.
        """
        assert transfer is not None
        try:
            stored = StoredSnapshot(snapshot, blob, memory)
            transfer.send((address, port), self._token, self._bytes_per_s, stored)
        finally:
            memory.close()

    def keep_only(self, save_id: str) -> None:
        self.release([each for each in self.held() if each.description["save_id"] != save_id])

    def describe_copies(self) -> list[SnapshotDescription]:
        return [stored.description for stored in self.held()]

    # ---------------------------------------------------------------- the copies, on any thread

    def held(self) -> list[StoredSnapshot]:
        """The copies, the oldest first."""
        with self._lock:
            return list(self._copies.values())

    def add(self, stored: StoredSnapshot) -> None:
        """Adds a complete copy; it replaces one of the same save and rank."""
        self.release([stored])
        with self._lock:
            self._copies[_key(stored)] = stored
        self.announce(self._socket)

    def release(self, copies: Iterable[StoredSnapshot]) -> None:
        """Releases the copies of the same saves and ranks as these."""
        for each in copies:
            with self._lock:
                released = self._copies.pop(_key(each), None)
            if released is not None:
                released.memory.close()


def _key(stored: StoredSnapshot) -> tuple[str, int]:
    return stored.description["save_id"], stored.description["rank"]


class CopyServer:
    """Receives a keeper's copies, and gives them out, at `address`, to those who know `token`."""

    def __init__(self, keeper: Keeper, address: str, token: str) -> None:
        self._keeper, self._token = keeper, token
        self._connections: set[Connection] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._free = threading.Semaphore(_MAX_CONNECTIONS)
        self._listener = listen(address)
        self.port = int(self._listener.getsockname()[1])
        start_thread("outlast-accept", self._accept_all)

    def close(self) -> None:
        stop(self._listener)
        with self._lock:
            self._closed = True
            for connection in self._connections:
                connection.cut()

    def _accept_all(self) -> None:
        self._free.acquire()
        for sock in accepted(self._listener):
            start_thread("outlast-copy", self._serve, sock)
            self._free.acquire()

    def _serve(self, sock: socket.socket) -> None:
        try:
            # The errors of a client, perhaps of another program, concern only that client.
            with sock, contextlib.suppress(OSError, EOFError, ConnectionRefused):
                connection = Connection.accept(sock, self._token)
                with self._lock:
                    if self._closed:
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
            save_id, rank = str(asked["save_id"]), int(asked["rank"])
            found = [each for each in self._keeper.held() if _key(each) == (save_id, rank)]
            if not found:
                raise CheckpointError(
                    f"there is no copy of rank {rank}'s snapshot of save {save_id}"
                )
            connection.send_frame(described(found[0]))
            send_content(connection, found[0])
        else:
            raise ValueError(f"unknown operation {asked['op']!r}")

    def _receive(self, connection: Connection, offer: dict[str, Any]) -> None:
        check_described(offer)
        snapshot, needed = offer["snapshot"], offer["size_bytes"] + offer["values_bytes"]
        of_rank = [
            each
            for each in self._keeper.held()
            if all(each.description[name] == snapshot[name] for name in ("rank", "folder_id"))
        ]
        # There are more than one only after a fault that came before `keep_only`.
        self._keeper.release(of_rank[:-1])
        free = available_bytes()
        if needed > free:
            raise CheckpointError(
                f"{size_text(needed)} were offered, and only {size_text(free)} of memory are "
                "available"
            )
        connection.send_frame({"ok": True})
        where = f"the snapshot of step {snapshot['step']}"
        self._keeper.add(
            receive_copy(connection, offer, lambda: connection.receive_frame()["files"], where)
        )
        connection.send_frame({"ok": True})


def main() -> None:
    """Runs the keeper."""
    run(Keeper, _NICE)


if __name__ == "__main__":
    main()
