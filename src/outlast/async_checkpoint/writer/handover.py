"""Hands the snapshots of a dead main process from its writer to the replacement process.

The writer opens a socket only once its main process is dead, so a process that can connect gets
snapshots of a dead process only. The socket is in a folder that only this user can enter, and both
ends check that the other one belongs to this user.

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from outlast.async_checkpoint.writer.messages import HeldSnapshot
from outlast.system.channel import Channel, pack, unpack
from outlast.system.waiting import readable

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
# A replacement that connects and then sends nothing must not keep the writer forever.
_PATIENCE_S = 10.0


@dataclasses.dataclass(frozen=True)
class HandedOver:
    """A snapshot: its description, its pickled values, the descriptor of its buffer."""

    snapshot: HeldSnapshot
    values: bytes
    descriptor: int


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


def hand_over(snapshots: Sequence[HandedOver], linger_s: float, launcher: int | None) -> None:
    """Waits for a replacement of the main process, for `linger_s` seconds, and hands it all
    snapshots. `launcher` is the pidfd of the process that would start one; without it, or without
    snapshots, it does not wait.
    """
    if not snapshots or launcher is None:
        return
    path = Path(snapshots[-1].snapshot["socket"])
    private_folder(path.parent)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        try:
            listener.listen(1)
            if listener.fileno() not in readable(listener.fileno(), launcher, timeout=linger_s):
                return
            connection, _ = listener.accept()
            path.unlink(missing_ok=True)
            if _is_ours(connection):
                _give(connection, snapshots)
            else:
                connection.close()
        finally:
            path.unlink(missing_ok=True)


def _give(connection: socket.socket, snapshots: Sequence[HandedOver]) -> None:
    channel = Channel(connection)
    with contextlib.suppress(OSError, EOFError):  # the replacement died too
        for snapshot in snapshots:
            channel.send(pack(dict(snapshot.snapshot), snapshot.values), [snapshot.descriptor])
        channel.send(b"")
        if readable(channel.fileno(), timeout=_PATIENCE_S):
            channel.receive()
    channel.close()


def take_over(path: Path) -> list[HandedOver]:
    """The snapshots of a dead predecessor, if its writer is still there. The caller closes the
    descriptors.
    """
    connection = socket.socket(socket.AF_UNIX)
    # Applies to sending and receiving: the other side answers at once, or never.
    connection.settimeout(_PATIENCE_S)
    try:
        private_folder(path.parent)
        connection.connect(str(path))
        if not _is_ours(connection):
            raise PermissionError(f"{path} belongs to another user")
    except OSError:
        connection.close()
        return []
    channel = Channel(connection)
    found: list[HandedOver] = []
    try:
        while True:
            payload, descriptors = channel.receive()
            if not payload:
                break
            header, values = unpack(payload)
            found.append(HandedOver(cast(HeldSnapshot, header), values, descriptors[0]))
        channel.send(b"thanks")
    except (OSError, EOFError):  # what has arrived is usable: checksums decide
        pass
    finally:
        channel.close()
    return found


def _is_ours(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())
