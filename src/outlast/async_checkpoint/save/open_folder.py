"""Opens a folder of checkpoints: rank 0 locks it, each rank takes over what a dead process left."""

from __future__ import annotations

import contextlib
import logging
import socket
import time

from outlast.async_checkpoint.environment import position
from outlast.async_checkpoint.save.folder_session import FolderSession
from outlast.async_checkpoint.storage.directory import leftovers
from outlast.async_checkpoint.storage.fence import raise_fence, stale
from outlast.async_checkpoint.storage.recycled_files import RECYCLED
from outlast.async_checkpoint.writer.main import Writer
from outlast.coordination.agreement import Agreement
from outlast.coordination.call_ledger import CallFailure
from outlast.errors import CheckpointError, FolderInUse, FolderUnusable
from outlast.system.error_text import describe

log = logging.getLogger("outlast.checkpoint")

_MEETING_S = 0.5
"""Between two attempts to lock a directory that another group of hosts has."""
_SEEN_S = 5.0
"""How long a rank looks for what rank 0 has written: a shared file system may show it late."""


def open_folder(session: FolderSession, ranks: Agreement, owner: str, *, known: bool) -> None:
    """Creates and locks the directory, and removes the remains of killed saves. Called on all
    ranks. While another group of hosts of this run has the directory, all wait: one of the two
    groups ends when they meet, and its hosts join the other. What rank 0 raises, all raise.
    After a restart in place, a process has had the folder open before (`known`): it takes over at
    once what a killed process has left. If all ranks have done so, there is no second round. A
    rank that could not tries again in the second round, where its error is raised on all ranks.
    Ranks with another path than rank 0 look for its id there: see `_check_same`.
    """
    warned = is_done = False

    def take_over() -> None:
        nonlocal is_done
        if not is_done:
            session.take_over()
            is_done = True

    def prepare(parts: list[tuple[bool, str]]) -> tuple[str, bool, bool]:
        # All ranks are here: a process that was rank 0 before has released the lock.
        nonlocal warned
        storage = session.storage
        ours = session.locked
        mine = position()
        if not ours:
            storage.prepare()
            try:
                storage.lock(owner, position=mine)
            except FolderInUse as e:
                if not e.another_group:
                    raise
                if not warned:
                    log.warning("%s: training waits until that job ends, or both have met", e)
                warned = True
                return "", False, False
            session.locked = True
        for folder, cause in stale(storage).items():
            log.warning("%s/%s is ignored and removed: %s", storage.where, folder, cause)
        if mine is not None:
            session.credentials = raise_fence(storage, mine)
        # This process can still use its recycled files.
        for name in leftovers(storage):
            if ours and name == RECYCLED:
                continue
            try:
                # Hidden by a rename first: a process that the job has left behind, and that
                # wakes up now, must not commit what is being removed.
                hidden = name if mine is None else storage.hide(name)
                session.writer.request(Writer.remove_folders, folders=[hidden or name])
            except (CheckpointError, OSError) as e:
                # Harmless: its name is not that of a checkpoint.
                log.warning("%s, left by an unfinished save, cannot be removed: %s", name, e)
            else:
                level = logging.DEBUG if name == RECYCLED else logging.INFO
                log.log(level, "removed %s, left by an unfinished save", name)
        done, paths = zip(*parts, strict=True)
        return storage.identity(), all(done), len(set(paths)) > 1

    if known:
        try:
            take_over()
        except (CheckpointError, OSError) as e:
            log.warning("taking over from a killed process failed, trying again: %s", describe(e))
    while not (answer := ranks.gather((is_done, session.storage.where), prepare))[0]:
        time.sleep(_MEETING_S)
    session.identity, all_done, differ = answer
    if differ:
        _check_same(session, ranks)
    taken = None if all_done else ranks.attempt(take_over)
    if isinstance(taken, CallFailure):
        error = CheckpointError(f"rank {taken.rank} on {taken.host}: {taken.cause}")
        raise ranks.attributed(error, taken.rank)


def _check_same(session: FolderSession, ranks: Agreement) -> None:
    """Paths that differ may be one folder, mounted in two places: then the id of rank 0 is in it.
    If not, all ranks raise a `FolderUnusable`. Otherwise no save would find the files of all ranks.
    """
    storage = session.storage
    until = time.monotonic() + _SEEN_S

    def is_same() -> bool:
        with contextlib.suppress(OSError):
            return storage.identity(create=False) == session.identity
        return False

    while not (same := is_same()) and time.monotonic() < until:
        time.sleep(0.2)

    def check(parts: list[tuple[bool, str, str]]) -> None:
        for rank, (found, path, host) in enumerate(parts):
            if not found:
                raise FolderUnusable(
                    f"rank {rank} on {host} saves into {path}, and rank 0 on {parts[0][2]} into "
                    f"{parts[0][1]}: all ranks have to give the same folder, on storage that they "
                    "share. If its name has the time, or a random part, let rank 0 choose it, and "
                    "broadcast it"
                )

    ranks.gather((same, storage.where, socket.gethostname()), check)
