"""Fencing: a process that its job has left behind cannot commit a checkpoint that counts.

A job on many hosts that loses a host goes on without it, while the processes there may only be
stopped. Rank 0 may be in the middle of a commit. When it wakes up, the job has restored an older
step, and a checkpoint that appears now is from a past that did not happen.

So whenever a job on many hosts opens its checkpoints, its rank 0 puts a *fence* beside them: a
numbered record with a new *writer id*, and the ids of the *refused* saves, not committed by then.

- Before a checkpoint becomes visible, the committer verifies that its host holds a lease, and that
  the newest fence has its writer id. This stops a process that wakes up before the check.
- A checkpoint of a refused save is *stale*: no restore reads it, and it is removed. This covers a
  process that was stopped between the check and the commit.

Why one of the two always applies:

    a save:   makes its directory,  then checks the fence,             then commits
    a fence:  is written,           then lists the directories of saves

If the check did not see the fence, the directory was made before the fence was written, so the
fence has the save in its list, unless it was committed by then: then the restore that follows finds
it, like any checkpoint before.

The order of fences: their numbers, and at equal numbers their position in the job (attempt, call,
iteration). A process that was stopped between reading the newest fence and writing its own uses a
number that others have used since, and an older position: its fence never counts. One that was
stopped earlier reads a fence with a later position, and stops.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import socket
import uuid
from contextlib import closing
from pathlib import Path

import msgspec

from outlast.async_checkpoint.storage.manifest import MANIFEST, saved_by
from outlast.async_checkpoint.storage.protocol import Position, Storage, step_of
from outlast.errors import CheckpointError
from outlast.system import lease_page
from outlast.system.lease_page import LeasePage

_RECORD = "fence.json"
_REFUSED = "refused.json"
_UNCOMMITTED = re.compile(r"(?:\.tmp-)?[a-z]+-\d+-([0-9a-f]+)")
_NAME = re.compile(r"\.fence-(\d{8})-([0-9a-f]{12})")
_KEPT = 4  # older records are removed: the newest one has all that is needed
_REMEMBERED = 1000  # refused saves


class Fenced(CheckpointError):
    """The job has gone on without this process."""


@dataclasses.dataclass(frozen=True)
class Credentials:
    """What a commit needs: the writer id of the newest fence, the lease page. Empty on one host."""

    writer: str = ""
    lease: str = ""


@dataclasses.dataclass(frozen=True)
class Fence:
    """One fence; `refused` are the saves not committed when a fence was made, the newest last."""

    number: int
    run: str
    order: tuple[int, ...]
    writer: str
    host: str
    refused: tuple[str, ...]

    @property
    def folder(self) -> str:
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
    """Puts up a fence against all earlier processes of the job; `Fenced` if the job has gone on
    without this one. On rank 0, with the lock held.
    """
    before = newest(storage)
    if before is not None and position.precedes(before.run, before.order):
        raise Fenced(_left_behind(storage, before))
    check_lease(storage, position.lease)
    fence = Fence(
        number=1 if before is None else before.number + 1,
        run=position.run,
        order=position.order,
        writer=uuid.uuid4().hex[:12],
        host=socket.gethostname(),
        refused=() if before is None else before.refused,
    )
    storage.put_record(fence.folder, _RECORD, msgspec.json.encode(fence))
    # Only now that committers can see the fence: see the module. If this process dies here, no step
    # was made since the fence before, and the next fence lists them.
    unfinished = _uncommitted(storage)
    if unfinished:
        refused = (*fence.refused, *unfinished)[-_REMEMBERED:]
        storage.put_record(fence.folder, _REFUSED, msgspec.json.encode(refused))
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
    refused = f"{socket.gethostname()} may not write to {storage.where}: its lease"
    try:
        with closing(LeasePage.open(Path(path))) as page:
            late_s = lease_page.now() - page.deadline
            valid = page.valid()
    except (OSError, ValueError) as e:
        raise Fenced(f"{refused} page {path} cannot be read: {e}") from e
    if not valid:
        raise Fenced(f"{refused} ended {late_s:.1f} s ago, so the job has gone on without it")


def stale(storage: Storage) -> dict[str, str]:
    """The stale checkpoints: their directories, and why. Costs little if no save was refused."""
    fence = newest(storage)
    if fence is None or not fence.refused:
        return {}
    refused = set(fence.refused)
    return {
        folder: f"stale, committed by a process that the job had left behind before fence "
        f"{fence.number} of {fence.host}"
        for folder in storage.folders()
        if step_of(folder) is not None and saved_by(storage, folder) in refused
    }


def _uncommitted(storage: Storage) -> list[str]:
    """The ids of saves whose directories have not become checkpoints."""
    found = []
    for folder in storage.folders():
        match = _UNCOMMITTED.fullmatch(folder)
        if match is None:
            continue
        if not folder.startswith("."):  # in its final place already: the manifest is the commit
            with contextlib.suppress(FileNotFoundError):
                storage.size(folder, MANIFEST)
                continue
        found.append(match[1])
    if not found:
        return []
    # After an exchange with an older checkpoint, the directory of a save that is committed still
    # exists, with the older one in it.
    finals = (f for f in storage.folders() if step_of(f) is not None)
    committed = {saved_by(storage, folder) for folder in finals}
    return [save_id for save_id in found if save_id not in committed]


def _read(storage: Storage, folder: str) -> Fence | None:
    try:
        fence = msgspec.json.decode(storage.get(folder, _RECORD), type=Fence)
    except (FileNotFoundError, ValueError):
        return None  # it is being written, or was not completed
    with contextlib.suppress(FileNotFoundError, ValueError):
        refused = msgspec.json.decode(storage.get(folder, _REFUSED), type=tuple[str, ...])
        return dataclasses.replace(fence, refused=refused)
    return fence


def _left_behind(storage: Storage, fence: Fence) -> str:
    return (
        f"the job has gone on without this process on {socket.gethostname()}: its rank 0 on "
        f"{fence.host} has opened {storage.where} (fence {fence.number}) since"
    )
