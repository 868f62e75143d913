"""What follows the end of a save: its event, its error for the caller, and on rank 0 the removal of
old checkpoints.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import Any

from outlast.async_checkpoint.handle import SaveHandle
from outlast.async_checkpoint.policies import FailurePolicy, Retention
from outlast.async_checkpoint.save.folder_session import FolderSession
from outlast.async_checkpoint.save.round import is_due_to_restart
from outlast.async_checkpoint.save.save import Save
from outlast.async_checkpoint.storage.directory import (
    CheckpointInfo,
    has_all_files,
    list_checkpoints,
    verify,
)
from outlast.async_checkpoint.storage.fence import stale
from outlast.async_checkpoint.storage.manifest import Manifest
from outlast.async_checkpoint.storage.system_errors import NO_ROOM
from outlast.async_checkpoint.writer.main import Writer
from outlast.async_checkpoint.writer.write_files import Dropped
from outlast.errors import CheckpointError, OutlastError, TornSnapshot, UnevenRanks
from outlast.events.emitter import Emitter
from outlast.events.types import CheckpointCommitted, CheckpointFailed, CheckpointRemoved

log = logging.getLogger("outlast.checkpoint")

_NOT_REMOVED = "old checkpoints could not be removed"


class SaveOutcomes:
    """Handles the outcomes of one rank's saves. Without a policy, the first failure is raised.
    `aborted` is set at an abort: the program may end the writer at any time then, and a
    removal of old checkpoints that is cut off is no failure.
    """

    def __init__(
        self,
        session: FolderSession,
        keep: Retention,
        policy: FailurePolicy | None,
        emitter: Emitter,
        aborted: threading.Event,
    ) -> None:
        self._aborted = aborted
        self._session, self._keep, self._policy, self._emitter = session, keep, policy, emitter
        self._unseen: list[SaveHandle] = []

    def watch(self, handle: SaveHandle) -> None:
        """Makes `raise_unseen` raise the error of this save, unless the handle was read before."""
        self._unseen.append(handle)

    def raise_unseen(self, *, saved_again: bool = False) -> None:
        """Raises the first error that no caller has seen, unless the policy tolerates it. That of a
        torn snapshot needs no action once a state is `saved_again`.
        """
        unseen = [handle for handle in self._unseen if handle.unseen_error is not None]
        self._unseen = [handle for handle in self._unseen if not handle.done()]
        for handle in unseen:
            error = handle.unseen_error
            assert error is not None
            handle._seen = True
            if saved_again and isinstance(error, TornSnapshot):
                continue
            if (
                isinstance(error, UnevenRanks)
                or self._policy is None
                or self._policy.in_a_row > self._policy.max_in_a_row
            ):
                raise error

    def ended(self, save: Save, size_bytes: int, error: Exception | None, queued: int) -> None:
        """Reports a save that has ended, on every rank. `queued` saves are still in progress."""
        times: dict[str, Any] = {
            "step": save.step,
            "blocked_seconds": save.blocked_s,
            "seconds": self._emitter.clock.now() - save.began,
            "queued": queued,
        }
        if error is None:
            if self._policy is not None:
                self._policy.succeeded()
            assert save.taken is not None
            own_bytes = save.taken.size_bytes
            self._emitter.emit(
                CheckpointCommitted(size_bytes=size_bytes, own_bytes=own_bytes, **times)
            )
            return
        if is_due_to_restart(error):
            # A restart in place drops the saves in progress, and the store may be gone before this
            # process is told. If training continues, the next call raises the error.
            log.debug("%s", error)
        elif isinstance(error, TornSnapshot):
            says = self._session.overlaps and not error.of_another_rank
            self._session.overlaps = False
            text = "%s. From now on, a save copies everything at once, as with overlap=False"
            log.log(logging.WARNING if says else logging.DEBUG, text, error)
        elif self._policy is None or not self._policy.failed(error):
            another = isinstance(error, OutlastError) and error.of_another_rank
            log.log(logging.INFO if another else logging.ERROR, "%s", error)
        self._emitter.emit(CheckpointFailed(cause=str(error), **times))

    def apply_retention(self, manifest: Manifest) -> None:
        """Removes the checkpoints that the commit of this one makes superfluous. On rank 0."""
        session, keep = self._session, self._keep
        if self._aborted.is_set() or (keep.keeps_all and not session.credentials.writer):
            return
        try:
            removable = []
            if not keep.keeps_all:
                removable = self._removable(manifest.step)
            names = [info.folder for info in removable]
            for folder, cause in stale(session.storage).items():
                log.warning("removed %s/%s, %s", session.storage.where, folder, cause)
                names.append(folder)
            if names:
                self._hide(names)
        except (CheckpointError, OSError, Dropped):
            self._not_removed()  # the save is committed, and old checkpoints only take up space
        else:
            for info in removable:
                self._emitter.emit(CheckpointRemoved(step=info.step))

    def _removable(self, committed: int) -> list[CheckpointInfo]:
        """What the retention removes after this commit. A checkpoint that lacks a file, or whose
        files have other sizes, cannot be restored: it does not count as one that is kept.
        """
        storage, keep = self._session.storage, self._keep
        infos = list_checkpoints(storage)
        removable = keep.removable(infos, committed)
        while removable:
            kept = [info for info in infos if info not in removable]
            damaged = [
                info
                for info in kept[-(keep.last or 1) :]
                if not has_all_files(storage, info.folder)
            ]
            if not damaged:
                break
            infos = [info for info in infos if info not in damaged]
            removable = [each for each in keep.removable(infos, committed) if each in removable]
        return removable

    def make_room(self, step: int, cause: str, ends: float) -> None:
        """After a save of `step` has failed, on rank 0: if the `cause` is a full disk, removes the
        checkpoints that its commit would, and recycled files. Training must be able to continue
        from one that stays: that one is read first. It is given up at the monotonic time `ends`.
        """
        session = self._session
        if NO_ROOM not in cause:
            return

        def check_time(_: int) -> None:
            if time.monotonic() > ends:
                raise TimeoutError("it takes too long to verify the checkpoint that stays")

        try:
            infos = list_checkpoints(session.storage)
            removable, usable = self._keep.removable_before(infos, step)
            if not removable:
                return
            verify(session.storage, usable, check_time)
            self._hide([info.folder for info in removable])
            self._warn(session.writer.request(Writer.await_removals, tidy=True))
        except (CheckpointError, OSError, Dropped):
            self._not_removed()
            return
        for info in removable:
            log.warning("removed step %d, to make room for step %d", info.step, step)
            self._emitter.emit(CheckpointRemoved(step=info.step))

    def _hide(self, folders: list[str]) -> None:
        session = self._session
        session.recycles = True
        allowed = dataclasses.asdict(session.credentials)
        self._warn(session.writer.request(Writer.hide_folders, folders=folders, **allowed))

    def await_removals(self) -> None:
        """After the last save: waits until the files of removed checkpoints are gone."""
        session = self._session
        if session.writer.pid is None:
            return
        try:
            self._warn(session.writer.request(Writer.await_removals, tidy=session.recycles))
        except (CheckpointError, Dropped):
            self._not_removed()

    def _not_removed(self) -> None:
        # After an abort the writer process may have ended: the next job removes them.
        level = logging.DEBUG if self._aborted.is_set() else logging.WARNING
        log.log(level, "%s", _NOT_REMOVED, exc_info=True)

    def _warn(self, errors: list[str]) -> None:
        for error in errors:
            log.warning(
                "%s, and take up room until the next job removes them: %s", _NOT_REMOVED, error
            )
