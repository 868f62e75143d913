"""Hands the snapshots of a dead main process from its writer to the replacement process, and with
them the memory that the main process asked the writer to keep.

The writer opens a socket only once its main process is dead, so a process that can connect gets
snapshots of a dead process only. The socket is in a folder that only this user can enter, and both
ends check that the other one belongs to this user.

A replacement may be faster than the writer, which first takes checksums. So a writer with snapshots
announces itself: it locks a file beside the socket, in which its main process is named. As long as
the file is locked and that process is dead, the replacement waits for the socket.

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from outlast.async_checkpoint.writer.messages import HeldSnapshot
from outlast.system.channel import Channel, pack, unpack
from outlast.system.files import FileLocked, lock_file
from outlast.system.processes import is_dying
from outlast.system.shared_memory import SharedMemory
from outlast.system.sockets import unix_address
from outlast.system.waiting import readable

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
# A replacement that connects and then sends nothing must not keep the writer forever.
_PATIENCE_S = 10.0
# How long a replacement waits for a writer that has announced itself: it may be hashing snapshots.
_OPENING_S = 60.0
_POLL_S = 0.01


@dataclasses.dataclass(frozen=True)
class HandedOver:
    """A snapshot: its description, its pickled values, the descriptor of its buffer."""

    snapshot: HeldSnapshot
    values: bytes
    descriptor: int


@dataclasses.dataclass(frozen=True)
class KeptMemory:
    """Memory that a writer keeps for its main process, and where a replacement gets it."""

    memory: SharedMemory
    socket: Path


@dataclasses.dataclass(frozen=True)
class Inheritance:
    """What a dead process has left: its snapshots, and the descriptor of the memory that its writer
    kept, or -1.
    """

    snapshots: Sequence[HandedOver] = ()
    kept: int = -1


def private_folder(folder: Path) -> Path:
    """Creates `folder` for this user only; raises `PermissionError` if it belongs to another user,
    is a link, or is open to others.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder of user {os.getuid()} with mode 0700")
    return folder


class Announcement:
    """A writer's announcement that it will hand over snapshots once `main`, a process id, is dead.
    It ends with the writer, however that ends.
    """

    def __init__(self, main: int) -> None:
        self._main = main
        self._path: Path | None = None
        self._descriptor = -1

    def place(self, socket_path: Path) -> None:
        """Announces a socket instead of the one before. Without success, a replacement that is too
        early restores from storage; the next snapshot tries again.
        """
        path = _announcement(socket_path)
        if self._descriptor >= 0 and path == self._path:
            return
        self.withdraw()
        with contextlib.suppress(OSError, FileLocked):
            private_folder(path.parent)
            self._descriptor = lock_file(path, str(self._main))
            self._path = path

    def withdraw(self) -> None:
        """Ends it."""
        if self._descriptor >= 0 and self._path is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def is_announced(socket_path: Path) -> bool:
    """Whether the writer of a dead process will listen at this socket."""
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(_announcement(socket_path), flags)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # the writer lives
        main = os.pread(descriptor, 20, 0)
        return main.isdigit() and is_dying(int(main))
    finally:
        os.close(descriptor)
    return False


def _announcement(socket_path: Path) -> Path:
    return socket_path.with_suffix(".writer")


def hand_over(
    snapshots: Sequence[HandedOver],
    linger_s: float,
    launcher: int | None,
    announcement: Announcement,
    kept: KeptMemory | None = None,
) -> None:
    """Waits for a replacement of the main process, for `linger_s` seconds, and hands it all
    snapshots and the kept memory. `launcher` is the pidfd of the process that would start one;
    without it, or with nothing to hand over, it does not wait.
    """
    if launcher is None or (not snapshots and kept is None):
        return
    # The main process says again where the memory goes whenever its rank changes.
    path = kept.socket if kept is not None else Path(snapshots[-1].snapshot["socket"])
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
            announcement.withdraw()  # before the writer of the replacement places its own
            if _is_ours(connection):
                _give(connection, snapshots, kept)
            else:
                connection.close()
        finally:
            path.unlink(missing_ok=True)


def _give(
    connection: socket.socket, snapshots: Sequence[HandedOver], kept: KeptMemory | None
) -> None:
    channel = Channel(connection)
    with contextlib.suppress(OSError, EOFError):  # the replacement died too
        if kept is not None:
            channel.send(pack({"kept": kept.memory.size_bytes}), [kept.memory.descriptor])
        for snapshot in snapshots:
            channel.send(pack(dict(snapshot.snapshot), snapshot.values), [snapshot.descriptor])
        channel.send(b"")
        if readable(channel.fileno(), timeout=_PATIENCE_S):
            channel.receive()
    channel.close()


def take_over(path: Path) -> Inheritance:
    """What a dead predecessor has left, if its writer is still there. The caller closes the
    descriptors.
    """
    deadline = time.monotonic() + _OPENING_S
    while (connection := _connect(path)) is None:
        if not is_announced(path) or time.monotonic() > deadline:
            return Inheritance()
        time.sleep(_POLL_S)
    channel = Channel(connection)
    found: list[HandedOver] = []
    kept = -1
    try:
        while True:
            payload, descriptors = channel.receive()
            if not payload:
                break
            header, values = unpack(payload)
            if "kept" in header:
                kept = descriptors[0]
                continue
            found.append(HandedOver(cast(HeldSnapshot, header), values, descriptors[0]))
        channel.send(b"thanks")
    except (OSError, EOFError):  # what has arrived is usable: checksums decide
        pass
    finally:
        channel.close()
    return Inheritance(found, kept)


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
        # A writer that was killed has left its socket. Between its `bind` and its `listen`, a live
        # writer refuses too, but it is announced.
        if not is_announced(path):
            path.unlink(missing_ok=True)
        return None
    except OSError:
        connection.close()
        return None
    return connection


def _is_ours(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())
