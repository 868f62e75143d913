"""How snapshots outlive a main process: its writer hands them to the process that replaces it.

The writer opens a socket only once its main process is dead, so that whoever can connect finds
snapshots of a dead process and of no other. The socket lies in a folder that only this user can
enter, and both ends check that the other one is this user.

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
from typing import Any

from outlast.system.channel import Channel, pack, unpack
from outlast.system.waiting import readable

__all__ = ["HandedOver", "claim", "hand_over", "private_folder"]

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
# A successor that connected and then says nothing must not keep the writer for ever.
_PATIENCE_S = 10.0


@dataclasses.dataclass(frozen=True)
class HandedOver:
    """A snapshot: what it is, the values of it that are no tensors, its memory's descriptor."""

    snapshot: dict[str, Any]
    values: bytes
    descriptor: int


def private_folder(folder: Path) -> Path:
    """Makes `folder` for this user alone, or checks that it is that.

    Raises:
        PermissionError: if it is somebody else's, a link, or open to others.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder of user {os.getuid()} with mode 0700")
    return folder


def hand_over(estate: Sequence[HandedOver], linger_s: float, launcher: int | None) -> None:
    """Waits for a successor, and gives it everything.

    Args:
        estate: the snapshots; without any, there is nothing to wait for.
        linger_s: seconds to wait.
        launcher: pidfd of the process that would start a successor; `None` if it is gone.
    """
    if not estate or launcher is None:
        return
    path = Path(estate[-1].snapshot["socket"])
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
            if not _is_ours(connection):
                connection.close()
                return
            _give(connection, estate)
        finally:
            path.unlink(missing_ok=True)


def _give(connection: socket.socket, estate: Sequence[HandedOver]) -> None:
    channel = Channel(connection)
    with contextlib.suppress(OSError, EOFError):  # it died as well: its own successor starts anew
        for snapshot in estate:
            channel.send(pack(snapshot.snapshot, snapshot.values), [snapshot.descriptor])
        channel.send(b"")
        if readable(channel.fileno(), timeout=_PATIENCE_S):
            channel.receive()
    channel.close()


def claim(path: Path) -> list[HandedOver]:
    """What a dead predecessor left, if its writer is still there. The descriptors are the
    caller's to close.
    """
    connection = socket.socket(socket.AF_UNIX)
    # For sending and receiving alike: the other side answers at once, or is not to be waited for.
    connection.settimeout(_PATIENCE_S)
    try:
        private_folder(path.parent)
        connection.connect(str(path))
    except OSError:
        connection.close()
        return []
    if not _is_ours(connection):
        connection.close()
        return []
    channel = Channel(connection)
    found: list[HandedOver] = []
    try:
        while True:
            payload, descriptors = channel.receive()
            if not payload:
                break
            snapshot, values = unpack(payload)
            found.append(HandedOver(snapshot, values, descriptors[0]))
        channel.send(b"thanks")
    except (OSError, EOFError):  # what has come is whole all the same: checksums tell
        pass
    finally:
        channel.close()
    return found


def _is_ours(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())
