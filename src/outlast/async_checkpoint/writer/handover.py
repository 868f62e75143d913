"""Snapshots in shared memory, and how they reach the replacement of a dead main process.

The process that holds them opens a socket only once its main process is dead, so a process that can
connect gets snapshots of a dead process only. The socket is in a folder that only this user can
enter, and both ends check that the other one belongs to this user.

A replacement may be faster than the holder, which first takes checksums. So a holder announces
itself: it locks a file beside the socket, in which its main process is named. As long as the file
is locked and that process is dead, the replacement waits for the socket.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

from outlast.system.channel import Channel, pack, unpack
from outlast.system.files import FileLocked, lock_file, private_folder
from outlast.system.processes import is_dying, readable
from outlast.system.shared_memory import PAGE_BYTES, SharedMemory
from outlast.system.sockets import process_at, unix_address

log = logging.getLogger("outlast.checkpoint")

# A replacement that connects and then sends nothing must not keep the holder forever.
_PATIENCE_S = 10.0
# How long a replacement waits for a holder that has announced itself: it may be hashing snapshots.
_OPENING_S = 60.0
_POLL_S = 0.01


class _Added(TypedDict, total=False):
    files: dict[str, dict[str, Any]] | None
    committed: bool
    metric: float | None
    place: str
    structure: str
    buffer: int
    index: str


class SnapshotDescription(_Added):
    """One snapshot, in JSON: its holder keeps it, another process or host reads it.

    Attributes:
        number: counts the saves of its checkpointer.
        save_id: identifies the save; the same on all ranks.
        folder_id: identifies the folder of checkpoints.
        working, final: the folder of the checkpoint, before and after the commit.
        layout: name, offset in the buffer and size of each file of tensors.
        values: the file of the pickled values; empty if there are none.
        places: offset and size of each value in that file.
        socket: where its holder waits for a replacement of the main process.
        files: `size_bytes` and `checksums` of each file, once they are known.
        buffer: the number of its buffer in the writer.
        index: what it holds and where (`Structure.index`), outside of the process that made it.
        metric, place, structure: of the save, for its end after a restart (`left_saves.py`); the
            structure by its digest.
    """

    step: int
    number: int
    save_id: str
    folder_id: str
    rank: int
    world_size: int
    working: str
    final: str
    layout: list[tuple[str, int, int]]
    values: str
    places: list[list[int]]
    socket: str


@dataclasses.dataclass(frozen=True)
class StoredSnapshot:
    """A complete snapshot: its description, its pickled values, the memory with its tensors."""

    description: SnapshotDescription
    values: bytes | bytearray
    memory: SharedMemory

    @property
    def parts(self) -> Iterator[tuple[str, memoryview]]:
        for name, at, size in self.description["layout"]:
            yield name, self.memory.view[at : at + size]
        if self.description["values"]:
            yield self.description["values"], memoryview(self.values)


class Announcement:
    """The announcement that snapshots are handed over at `socket` once `main`, a process id, is
    dead. It ends with the process that makes it, however that ends.
    """

    def __init__(self, main: int) -> None:
        self.socket: Path | None = None
        self._main = main
        self._descriptor = -1

    def place(self, socket: str | Path) -> None:
        """Announces a socket instead of the one before. Without success, a replacement that is too
        early restores from storage; the next snapshot tries again.
        """
        path = Path(socket)
        if self._descriptor >= 0 and path == self.socket:
            return
        self.withdraw()
        self.socket = path
        with contextlib.suppress(OSError, FileLocked):
            private_folder(path.parent)
            self._descriptor = lock_file(_lock_of(path), str(self._main))

    def withdraw(self) -> None:
        if self._descriptor >= 0 and self.socket is not None:
            _lock_of(self.socket).unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def is_announced(socket_path: Path) -> bool:
    """Whether snapshots of a dead process will be handed over at this socket."""
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(_lock_of(socket_path), flags)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # the holder lives
        main = os.pread(descriptor, 20, 0)
        # After a restart in place, this process itself: reading its status is most of a takeover.
        return main.isdigit() and int(main) != os.getpid() and is_dying(int(main))
    finally:
        os.close(descriptor)
    return False


def _lock_of(socket_path: Path) -> Path:
    return socket_path.with_suffix(".writer")


def hand_over(
    announcement: Announcement,
    snapshots: Sequence[StoredSnapshot],
    kept: Mapping[str, SharedMemory],
    linger_s: float,
    launcher: int | None,
) -> None:
    """Waits for a replacement of the main process, for `linger_s` seconds, at the socket that was
    announced, and hands it all snapshots and the memory that was kept. `launcher` is the pidfd of
    the process that would start one; without it, or with nothing to hand over, it does not wait.
    """
    path = announcement.socket
    if launcher is None or path is None or not (snapshots or kept):
        return
    private_folder(path.parent)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        with unix_address(path) as address:
            listener.bind(address)
        try:
            listener.listen(1)
            if listener.fileno() not in readable(listener.fileno(), launcher, timeout=linger_s):
                return
            connection, _ = listener.accept()
            path.unlink(missing_ok=True)
            announcement.withdraw()  # before the holder of the replacement places its own
            if _is_ours(connection):
                _give(connection, snapshots, kept)
            else:
                connection.close()
        finally:
            path.unlink(missing_ok=True)


def _give(
    connection: socket.socket,
    snapshots: Sequence[StoredSnapshot],
    kept: Mapping[str, SharedMemory],
) -> None:
    channel = Channel(connection)
    with contextlib.suppress(OSError, EOFError):  # the replacement died too
        for name, memory in kept.items():
            channel.send(pack({"kept": name}), [memory.descriptor])
        for each in snapshots:
            channel.send(pack(dict(each.description), bytes(each.values)), [each.memory.descriptor])
        channel.send(b"")
        if readable(channel.fileno(), timeout=_PATIENCE_S):
            channel.receive()
    channel.close()


def take_over(path: Path) -> tuple[list[StoredSnapshot], dict[str, SharedMemory]]:
    """The snapshots that a dead predecessor has left, and the memory that was kept for it, by name,
    if their holder is still there. What is lost is left out: an access to it would end the process.
    """
    deadline = time.monotonic() + _OPENING_S
    while (connection := _connect(path)) is None:
        if not is_announced(path) or time.monotonic() > deadline:
            return [], {}
        time.sleep(_POLL_S)
    channel = Channel(connection)
    found: list[StoredSnapshot] = []
    kept: dict[str, SharedMemory] = {}
    try:
        while True:
            payload, descriptors = channel.receive()
            if not payload:
                break
            header, values = unpack(payload)
            ends = [at + size for _, at, size in header.get("layout", ())]
            memory = _intact(descriptors[0], max(ends, default=1))
            if "kept" in header:
                kept |= {} if memory is None else {header["kept"]: memory}
            elif memory is not None:
                found.append(StoredSnapshot(cast(SnapshotDescription, header), values, memory))
            else:
                log.warning(
                    "the memory with the snapshot of step %d is lost; a checkpoint is used instead",
                    header["step"],
                )
        channel.send(b"thanks")
    except (OSError, EOFError):  # what has arrived is usable: checksums decide
        pass
    finally:
        channel.close()
    return found, kept


def _intact(descriptor: int, needed_bytes: int) -> SharedMemory | None:
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes >= needed_bytes:
        return SharedMemory(size_bytes - size_bytes % PAGE_BYTES, descriptor)
    os.close(descriptor)
    return None


def _connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    # Applies to sending and receiving: the other side answers at once, or never.
    connection.settimeout(_PATIENCE_S)
    try:
        private_folder(path.parent)
        with unix_address(path) as address:
            connection.connect(address)
        if not _is_ours(connection):
            raise PermissionError(f"{path} belongs to another user")
    except ConnectionRefusedError:
        connection.close()
        # A holder that was killed has left its socket. Between its `bind` and its `listen`, a live
        # one refuses too, but it is announced.
        if not is_announced(path):
            path.unlink(missing_ok=True)
        return None
    except OSError:
        connection.close()
        return None
    return connection


def _is_ours(connection: socket.socket) -> bool:
    return process_at(connection)[1] == os.getuid()
