"""Sends one snapshot to the keeper of another host, and fetches a copy from one."""

from __future__ import annotations

import threading

from outlast.async_checkpoint.peer_copies.connection import Connection
from outlast.async_checkpoint.peer_copies.content import (
    Cancelled,
    HeldCopy,
    Pace,
    check_description,
    receive_copy,
    send_content,
)
from outlast.async_checkpoint.peer_copies.messages import SentSnapshot
from outlast.errors import CheckpointError
from outlast.system.error_text import describe
from outlast.system.shared_memory import SharedMemory


class Transfer:
    """A copy that is being sent. `cancel` returns at once; from then on the copy is never complete,
    even if this thread waits for the network: the receiver holds a copy only once it has the last
    frame, which is sent under a lock.
    """

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def cancel(self) -> None:
        """Calls the copy off."""
        with self._lock:
            self._cancelled.set()
            if self._connection is not None:
                self._connection.cut()

    def send(
        self,
        to: tuple[str, int],
        token: str,
        bytes_per_s: float,
        snapshot: SentSnapshot,
        memory: SharedMemory,
        values: bytes,
    ) -> None:
        """Sends the snapshot; returns when the other end has verified it.

        Raises:
            CheckpointError: names the cause.
        """
        try:
            connection = Connection.open(*to, token)
            try:
                with self._lock:
                    self._check()
                    self._connection = connection
                self._send(connection, bytes_per_s, snapshot, memory, values)
            finally:
                with self._lock:
                    self._connection = None
                connection.close()
        except Cancelled:
            raise CheckpointError("it was called off") from None
        except (OSError, EOFError, ValueError, KeyError) as e:
            with self._lock:
                cancelled = self._cancelled.is_set()
            cause = "it was called off" if cancelled else f"{to[0]}:{to[1]}: {describe(e)}"
            raise CheckpointError(cause) from e

    def _send(
        self,
        connection: Connection,
        bytes_per_s: float,
        snapshot: SentSnapshot,
        memory: SharedMemory,
        values: bytes,
    ) -> None:
        connection.send_frame(
            {
                "op": "offer",
                "snapshot": snapshot,
                "size_bytes": memory.size_bytes,
                "values_bytes": len(values),
            }
        )
        _check_accepted(connection)
        pace = Pace(bytes_per_s, self._cancelled)
        sent = send_content(connection, snapshot, memory.view, values, pace)
        # The checksums of the main process, if it took any, also cover the time before.
        files = snapshot.get("files") or sent
        with self._lock:
            self._check()
            connection.send_frame({"files": files})
        _check_accepted(connection)

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled


def fetch_copy(host: str, at: tuple[str, int], token: str, save_id: str, rank: int) -> HeldCopy:
    """Fetches the copy of a rank's snapshot from the keeper at this address, on `host`.

    Raises:
        CheckpointError: if it cannot be fetched, or a byte has changed; names the host.
    """
    where = f"the copy of rank {rank}'s snapshot on host {host}"
    try:
        connection = Connection.open(*at, token)
        try:
            connection.send_frame({"op": "fetch", "save_id": save_id, "rank": rank})
            said = connection.receive_frame()
            if "error" in said:
                raise CheckpointError(f"{where} cannot be fetched: {said['error']}")
            check_description(said["snapshot"], said["size_bytes"], said["values_bytes"])
            files = said["snapshot"]["files"] or {}
            return receive_copy(connection, said, lambda: files, where)
        finally:
            connection.close()
    except (OSError, EOFError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(
            f"{where} cannot be fetched from {at[0]}:{at[1]}: {describe(e)}"
        ) from e


def _check_accepted(connection: Connection) -> None:
    said = connection.receive_frame()
    if "error" in said:
        raise CheckpointError(f"refused by its holder: {said['error']}")
