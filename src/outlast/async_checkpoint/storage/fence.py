"""Fencing: a process that its job has left behind cannot commit a checkpoint that counts.

A job on many hosts that loses a host goes on without it, while the processes there may only be
stopped. Rank 0 may be in the middle of a commit. When it wakes up, the job has restored an older
step, and a checkpoint that appears now is from a past that did not happen.

So whenever a job on many hosts opens its checkpoints, its rank 0 puts a *fence* beside them: a
numbered record with the checkpoints that are committed, and a new *writer id*. Each commit bears
the writer id of the fence of its process.

- Before a checkpoint becomes visible, the committer verifies that its host holds a lease, and that
  the newest fence is its own. This refuses a process that wakes up before the check.
- A checkpoint whose writer id belongs to an older fence, and which is not among those that were
  committed when the next fence was made, is *stale*: no restore reads it, and it is removed. This
  covers a process that was stopped between the check and the rename.

The order of fences: their numbers, and at equal numbers their position in the job (attempt, call,
iteration). A process that was stopped between reading the newest fence and writing its own uses a
number that others have used since, and an older position: its fence never counts. One that was
stopped earlier reads a fence with a later position, and stops.

Checkpoints without a writer id, of a job on one host or copied from elsewhere, are never stale.
Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import uuid
from pathlib import Path
from typing import Any

from outlast.async_checkpoint.storage.manifest import Head, read_head
from outlast.async_checkpoint.storage.position import Position
from outlast.async_checkpoint.storage.protocol import Storage, step_of
from outlast.errors import CheckpointError
from outlast.system import lease_page
from outlast.system.lease_page import LeasePage

_RECORD = "fence.json"
_NAME = re.compile(r"\.fence-(\d{8})-([0-9a-f]{12})")
_KEPT = 4  # older records are removed: the newest one has all that is needed
_SUPERSEDED = 1000  # writer ids that a fence remembers


class Fenced(CheckpointError):
    """The job has gone on without this process."""


@dataclasses.dataclass(frozen=True)
class Credentials:
    """What a commit needs: the writer id of the newest fence, and the path of the lease page. Both
    are empty in a job on one host.
    """

    writer: str = ""
    lease: str = ""


@dataclasses.dataclass(frozen=True)
class Fence:
    """One fence: see the module.

    Attributes:
        committed: the checksum of the manifest of each checkpoint, by its directory.
        superseded: the writer ids of older fences, the newest last.
    """

    number: int
    run: str
    order: tuple[int, ...]
    writer: str
    host: str
    committed: dict[str, str]
    superseded: tuple[str, ...]

    @property
    def folder(self) -> str:
        """The directory of its record."""
        return f".fence-{self.number:08d}-{self.writer}"


def newest(storage: Storage) -> Fence | None:
    """The fence that counts; `None` if there is none. One that is being written does not count."""
    numbers: dict[int, list[str]] = {}
    for folder in storage.folders():
        if match := _NAME.fullmatch(folder):
            numbers.setdefault(int(match[1]), []).append(folder)
    for number in sorted(numbers, reverse=True):
        found = [fence for folder in numbers[number] if (fence := _read(storage, folder))]
        if found:
            return max(found, key=lambda fence: (fence.order, fence.writer))
    return None


def raise_fence(storage: Storage, position: Position) -> Credentials:
    """Puts up a fence against all earlier processes of the job. On rank 0, with the lock held.

    Raises:
        Fenced: if the job has gone on without this process.
    """
    before = newest(storage)
    if before is not None and position.precedes(before.run, before.order):
        raise Fenced(_left_behind(storage, before))
    check_lease(storage, position.lease)
    old = stale(storage)
    committed = {folder: head.checksum for folder, head in _heads(storage) if folder not in old}
    superseded = () if before is None else (*before.superseded, before.writer)
    fence = Fence(
        number=1 if before is None else before.number + 1,
        run=position.run,
        order=position.order,
        writer=uuid.uuid4().hex[:12],
        host=socket.gethostname(),
        committed=committed,
        superseded=superseded[-_SUPERSEDED:],
    )
    storage.make(fence.folder)
    storage.put(fence.folder, _RECORD, json.dumps(dataclasses.asdict(fence)).encode())
    storage.sync(fence.folder)
    for folder in storage.folders():
        match = _NAME.fullmatch(folder)
        if match and int(match[1]) <= fence.number - _KEPT:
            storage.remove(folder)
    check_fence(storage, fence.writer)
    return Credentials(fence.writer, position.lease)


def check(storage: Storage, credentials: Credentials) -> None:
    """Raises `Fenced` if a process with these credentials may not change what is visible."""
    if credentials.writer:
        check_lease(storage, credentials.lease)
        check_fence(storage, credentials.writer)


def check_fence(storage: Storage, writer: str) -> None:
    """Raises `Fenced` if the newest fence is not that of `writer`."""
    fence = newest(storage)
    if fence is not None and fence.writer != writer:
        raise Fenced(_left_behind(storage, fence))


def check_lease(storage: Storage, path: str) -> None:
    """Raises `Fenced` if this host holds no lease; `path` is its lease page."""
    try:
        page = LeasePage.open(Path(path))
    except (OSError, ValueError) as e:
        raise Fenced(
            f"{socket.gethostname()} may not write to {storage.where}: its lease page {path} "
            f"cannot be read: {e}"
        ) from e
    try:
        late_s = lease_page.now() - page.deadline
        valid = page.valid()
    finally:
        page.close()
    if not valid:
        raise Fenced(
            f"{socket.gethostname()} may not write to {storage.where}: its lease ended "
            f"{late_s:.1f} s ago, so the job has gone on without it"
        )


def stale(storage: Storage) -> dict[str, str]:
    """The stale checkpoints: their directories, and why. Reads nothing if there is no fence."""
    fence = newest(storage)
    if fence is None:
        return {}
    return {
        folder: f"stale, committed by a process that the job had left behind before fence "
        f"{fence.number} of {fence.host}"
        for folder, head in _heads(storage)
        if head.writer in fence.superseded and fence.committed.get(folder) != head.checksum
    }


def _heads(storage: Storage) -> list[tuple[str, Head]]:
    """The head of the manifest of each checkpoint; without those that cannot be read, which no
    restore can use either.
    """
    found = []
    for folder in storage.folders():
        if step_of(folder, storage.prefix) is not None:
            head = read_head(storage, folder)
            if head is not None:
                found.append((folder, head))
    return found


def _read(storage: Storage, folder: str) -> Fence | None:
    try:
        values: dict[str, Any] = json.loads(storage.get(folder, _RECORD))
        values["order"] = tuple(values["order"])
        values["superseded"] = tuple(values["superseded"])
        return Fence(**values)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None  # it is being written, or was not completed


def _left_behind(storage: Storage, fence: Fence) -> str:
    return (
        f"the job has gone on without this process on {socket.gethostname()}: its rank 0 on "
        f"{fence.host} has opened {storage.where} (fence {fence.number}) since"
    )
