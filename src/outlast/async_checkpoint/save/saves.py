"""The saves of one rank, in their order: on the training thread, then on a thread of their own.

`Saves.save` runs on the training thread, takes the snapshot, and returns the handle. One thread
then completes the saves one after another: what a save does is in `save.py`; at its end come
buffer, handle, event, and on rank 0 the removal of old checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from outlast.async_checkpoint.handle import SaveHandle
from outlast.async_checkpoint.policies import FailurePolicy, Retention
from outlast.async_checkpoint.save.folder_session import FolderSession
from outlast.async_checkpoint.save.round import ABORTED, SaveRound, is_due_to_restart
from outlast.async_checkpoint.save.save import Save, Shared
from outlast.async_checkpoint.save.structures import Structures
from outlast.async_checkpoint.snapshot.snapshot import Snapshotter
from outlast.async_checkpoint.state_dict import signature_and_leaves
from outlast.async_checkpoint.storage.directory import list_checkpoints
from outlast.async_checkpoint.storage.fence import stale
from outlast.async_checkpoint.storage.manifest import Manifest
from outlast.async_checkpoint.writer.main import Writer
from outlast.async_checkpoint.writer.write_files import Dropped
from outlast.coordination.agreement import OF_ALL_RANKS
from outlast.coordination.call_ledger import CallLedger
from outlast.errors import CheckpointError, OutlastError, StoreError
from outlast.events.emitter import Emitter
from outlast.events.types import CheckpointCommitted, CheckpointFailed, CheckpointRemoved
from outlast.system.error_text import describe

log = logging.getLogger("outlast.checkpoint")

_CONCLUDE_S = 10.0  # for rank 0, after an abort that came too late to drop a save
_NOT_REMOVED = "old checkpoints could not be removed"


class Saves:
    """One rank's saves."""

    def __init__(
        self,
        session: FolderSession,
        ledger: CallLedger,
        emitter: Emitter,
        *,
        job: str,
        optimizers: Sequence[Optimizer],
        timeout_s: float,
        keep: Retention,
        policy: FailurePolicy | None,
    ) -> None:
        structures = Structures(session.memo, ledger.rank, ledger.world_size)
        snapshotter = Snapshotter(session.writer, optimizers)
        self.shared = Shared(session, ledger, structures, snapshotter, job, timeout_s)
        self._outcomes = SaveOutcomes(session, keep, policy, emitter)
        self._clock = emitter.clock
        self._count = 0  # of saves so far, including those without a snapshot
        self._queue: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._pending: list[Save] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._thread_ends = threading.Event()

    @property
    def pending(self) -> list[Save]:
        with self._lock:
            return list(self._pending)

    # --------------------------------------------------------------- on the training thread

    def save(
        self,
        step: int,
        state_dict: Mapping[str, Any],
        metric: float | None,
        finite: Collection[str] = (),
    ) -> SaveHandle:
        """Takes a snapshot and begins its save. See `Checkpointer.save`."""
        began = self._clock.now()
        self.seal_all()
        earlier = self.pending
        save = Save(self.shared, self._next_index(), step, metric, finite, began)
        try:
            # On other ranks the earlier save may have ended: this one counts, and fails on all.
            if any(each.step == step for each in earlier):
                raise ValueError(f"step {step} is being saved already: wait for its handle")
            save.snapshot(state_dict, earlier)
            save.blocked_s = self._clock.now() - began
            self._outcomes.watch(save.handle)
            self._enqueue(save)
        except StoreError as e:
            raise CheckpointError(f"the {save.name} failed: {describe(e)}") from e
        except BaseException as e:
            if save not in self.pending and not isinstance(e, OF_ALL_RANKS):
                save.refuse(e)
            raise
        # Last: other ranks may raise it at a later save, and the saves of all ranks stay in step.
        self.raise_unseen()
        return save.handle

    def prepare(self, state_dict: Mapping[str, Any]) -> None:
        """After a restore, before the first save: what is restored will be saved, so the ranks
        agree on it now, and buffers are allocated in the background.
        """
        if self._count:
            return
        shared = self.shared
        name, divide = "preparation of saves", shared.structures.divide
        agreement = SaveRound(shared.ledger, self._next_index(), name, divide, shared.timeout_s)
        try:
            signature = signature_and_leaves(state_dict)[0]
            structure = shared.structures.agree(state_dict, signature, agreement)
            agreement.forget()
        except BaseException as e:
            if not isinstance(e, OF_ALL_RANKS):
                with contextlib.suppress(StoreError):
                    agreement.refuse(e)
            if not isinstance(e, CheckpointError | ValueError):
                raise
            # The first save raises the same error.
            log.debug("saves were not prepared: %s", e)
        else:
            shared.session.pool.preallocate(structure)

    def seal_all(self) -> None:
        """Seals every snapshot; on the training thread, which writes to no tensor meanwhile."""
        for save in self.pending:
            save.seal()

    def _next_index(self) -> int:
        self._count += 1
        return self._count - 1

    def _enqueue(self, save: Save) -> None:
        with self._lock:
            self._pending.append(save)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outlast-saver", daemon=True)
            self._thread.start()
        self._queue.put(save)

    # ------------------------------------------------------------- on the thread of the saves

    def _run(self) -> None:
        try:
            while (save := self._queue.get()) is not None:
                self._complete(save)
            if not self.shared.aborted:
                self._outcomes.await_removals()
        finally:
            self._thread_ends.set()

    def _complete(self, save: Save) -> None:
        size_bytes = 0
        manifest: Manifest | None = None
        error: Exception | None = None
        try:
            size_bytes, manifest = save.complete()
        except Exception as e:  # noqa: BLE001 - a bug here must not look like a slow save
            error = save.round.own_error(e)
        with self._lock:
            self._pending.remove(save)
            queued = len(self._pending)
        taken, session = save.taken, self.shared.session
        assert taken is not None
        if error is None:
            taken.description["committed"] = True
            number = taken.buffer.number
            session.writer.tell(Writer.committed, buffer=number, save_id=taken.save_id)
        session.pool.give_back(taken.buffer, taken.turn)
        save.handle._end(error, save.step)
        self._outcomes.ended(save, size_bytes, error, queued)
        # Last, so that nothing waits for it.
        if manifest is not None:
            self._outcomes.apply_retention(manifest)

    # ----------------------------------------------------------------------------- ending

    def wait(self, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for save in self.pending:
            save.handle.result(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        self.raise_unseen()

    def raise_unseen(self) -> None:
        self._outcomes.raise_unseen()

    def abort(self) -> None:
        """Drops all saves in progress, on all ranks. Does not wait: the store may be out of reach.

        Can be called again, because an interrupt may have cut it short.
        """
        self.shared.aborted = True
        self._outcomes.abandoned.set()
        pending = self.pending
        for save in pending:
            if save.taken is not None:
                save.taken.call_off()
        if pending:
            self.shared.session.writer.tell(Writer.drop_saves)
            threading.Thread(
                target=self._claim_abort, args=(pending,), name="outlast-abort", daemon=True
            ).start()
        self._queue.put(None)
        if self.shared.session.copies is not None:
            self.shared.session.copies.abandon()
        self.shared.snapshotter.abandon()

    def check_not_in_callback(self) -> None:
        """Raises `RuntimeError` on the thread of the saves, which cannot wait for its own end."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "close() was called in a callback of a save: call it on the training thread, or "
                "call abort()"
            )

    def finish(self, timeout_s: float | None) -> bool:
        self._queue.put(None)
        if self._thread is None:
            return True
        # Not `join`: if a signal handler raises in it, CPython 3.11 takes the thread for ended.
        return self._thread_ends.wait(timeout_s)

    def _claim_abort(self, saves: list[Save]) -> None:
        try:
            late = [save for save in saves if not save.round.fail(save.round.failure(ABORTED))]
            for save in late:
                if not save.handle._await_end(_CONCLUDE_S):
                    save.round.conclude({"unknown": "rank 0 did not report it before the restart"})
        except StoreError:
            pass  # the thread of the saves, which waits on the store, gets the same error


class SaveOutcomes:
    """Handles the outcomes of one rank's saves. Without a policy, the first failure is raised.
    `abandoned` is set after an abort: the program may end the writer at any time then, and a
    removal of old checkpoints that is cut off is no failure.
    """

    def __init__(
        self,
        session: FolderSession,
        keep: Retention,
        policy: FailurePolicy | None,
        emitter: Emitter,
    ) -> None:
        self.abandoned = threading.Event()
        self._session = session
        self._keep = keep
        self._policy = policy
        self._emitter = emitter
        self._unseen: list[SaveHandle] = []

    def watch(self, handle: SaveHandle) -> None:
        """Makes `raise_unseen` raise the error of this save, unless the handle was read before."""
        self._unseen.append(handle)

    def raise_unseen(self) -> None:
        """Raises the first error that no caller has seen, unless the policy tolerates it."""
        unseen = [handle for handle in self._unseen if handle.unseen_error is not None]
        self._unseen = [handle for handle in self._unseen if not handle.done()]
        for handle in unseen:
            error = handle.unseen_error
            assert error is not None
            handle._seen = True
            if self._policy is None or self._policy.in_a_row > self._policy.max_in_a_row:
                raise error

    def ended(self, save: Save, size_bytes: int, error: Exception | None, queued: int) -> None:
        """Reports a save that has ended, on every rank. `queued` saves are still in progress."""
        seconds = self._emitter.clock.now() - save.began
        if error is None:
            if self._policy is not None:
                self._policy.succeeded()
            assert save.taken is not None
            self._emitter.emit(
                CheckpointCommitted(
                    step=save.step,
                    size_bytes=size_bytes,
                    own_bytes=save.taken.size_bytes,
                    blocked_seconds=save.blocked_s,
                    seconds=seconds,
                    queued=queued,
                )
            )
            return
        if is_due_to_restart(error):
            # A restart in place drops the saves in progress, and the store may be gone before this
            # process is told. If training continues, the next call raises the error.
            log.debug("%s", error)
        elif self._policy is None or not self._policy.failed(error):
            another = isinstance(error, OutlastError) and error.of_another_rank
            log.log(logging.INFO if another else logging.ERROR, "%s", error)
        self._emitter.emit(
            CheckpointFailed(
                step=save.step,
                cause=str(error),
                blocked_seconds=save.blocked_s,
                seconds=seconds,
                queued=queued,
            )
        )

    def apply_retention(self, manifest: Manifest) -> None:
        """Removes the checkpoints that the commit of this one makes superfluous. On rank 0."""
        session, keep = self._session, self._keep
        if self.abandoned.is_set() or (keep.keeps_all and not session.credentials.writer):
            return
        try:
            removable = []
            if not keep.keeps_all:
                removable = keep.removable(list_checkpoints(session.storage), manifest.step)
            names = [info.folder for info in removable]
            for folder, cause in stale(session.storage).items():
                log.warning("removed %s/%s, %s", session.storage.where, folder, cause)
                names.append(folder)
            if names:
                session.recycles = True
                allowed = dataclasses.asdict(session.credentials)
                self._warn(session.writer.request(Writer.hide_folders, folders=names, **allowed))
        except (CheckpointError, OSError, Dropped):
            self._not_removed()  # the save is committed, and old checkpoints only take up space
        else:
            for info in removable:
                self._emitter.emit(CheckpointRemoved(step=info.step))

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
        level = logging.DEBUG if self.abandoned.is_set() else logging.WARNING
        log.log(level, "%s", _NOT_REMOVED, exc_info=True)

    def _warn(self, errors: list[str]) -> None:
        for error in errors:
            log.warning(
                "%s, and take up room until the next job removes them: %s", _NOT_REMOVED, error
            )
