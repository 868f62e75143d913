"""The saves of one rank, each from beginning to end.

`SavePipeline.save` runs on the training thread: agree who saves what, if the structure of the
state dict is new; take the snapshot; return the handle. One thread of each rank then carries the
saves out, one after another (`_complete`): write, seal, verdict, commit and conclusion are in
`protocol`; at the end come buffer, handle, event, and on rank 0 the removal of old checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
from collections.abc import Collection, Mapping
from typing import Any

from outlast.async_checkpoint.handle import SaveHandle
from outlast.async_checkpoint.save.after_save import SaveOutcomes
from outlast.async_checkpoint.save.folder_session import FolderSession
from outlast.async_checkpoint.save.protocol import SaveProtocol
from outlast.async_checkpoint.save.save import (
    ABORTED,
    Save,
    error_from,
    no_buffer,
    save_name,
)
from outlast.async_checkpoint.save.structure_exchange import StructureExchange
from outlast.async_checkpoint.save.take_snapshot import Snapshotter
from outlast.async_checkpoint.snapshot.buffers import NoFreeBuffer
from outlast.async_checkpoint.storage.manifest import Manifest
from outlast.async_checkpoint.writer.messages import (
    DropSaves,
    SnapshotCommitted,
)
from outlast.clock import Clock
from outlast.coordination.agreement import OF_ALL_RANKS
from outlast.coordination.call_ledger import CallFailure, CallLedger
from outlast.errors import (
    CheckpointError,
    CheckpointTimeout,
    SaveCancelled,
    StoreError,
)
from outlast.system.error_text import describe

log = logging.getLogger("outlast.checkpoint")

_CONCLUDE_S = 10.0  # for rank 0, after an abort that came too late to drop a save


class SavePipeline:
    """One rank's saves. Call i of `ledger` is save i."""

    def __init__(
        self,
        session: FolderSession,
        ledger: CallLedger,
        exchange: StructureExchange,
        snapshotter: Snapshotter,
        outcomes: SaveOutcomes,
        clock: Clock,
        timeout_s: float,
    ) -> None:
        self._session = session
        self._ledger = ledger
        self._exchange = exchange
        self._snapshotter = snapshotter
        self._outcomes = outcomes
        self._clock = clock
        self._protocol = SaveProtocol(session, ledger, exchange, timeout_s)
        self._count = 0  # of saves so far, including those without a snapshot
        self._queue: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._pending: list[Save] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._thread_ends = threading.Event()

    @property
    def pending(self) -> list[Save]:
        """The saves that have not ended, oldest first."""
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
        index, timeout_s = self._next_index(), self._protocol.timeout_s
        try:
            # On other ranks the earlier save may have ended: this one counts, and fails on all.
            if any(save.step == step for save in self.pending):
                raise ValueError(f"step {step} is being saved already: wait for its handle")
            agreed = self._exchange.agree(index, state_dict)
            snapshot = self._snapshotter.take(
                index, step, state_dict, agreed.structure, agreed.leaves, timeout_s
            )
        except NoFreeBuffer:
            earlier = [save.step for save in self.pending]
            error = no_buffer(step, earlier, self._ledger.rank, timeout_s, self._session.url)
            self._refuse(index, step, error)
            raise error from None
        except StoreError as e:
            raise CheckpointError(f"the {save_name(step)} failed: {describe(e)}") from e
        except BaseException as e:
            if not isinstance(e, OF_ALL_RANKS):
                self._refuse(index, step, e)
            raise
        save = Save(
            index=index,
            rank=self._ledger.rank,
            step=step,
            metric=metric,
            snapshot=snapshot,
            agreed=agreed.new,
            catalog=agreed.catalog,
            handle=SaveHandle(step, snapshot.seal),
            began=began,
            blocked_s=self._clock.now() - began,
            finite=finite,
        )
        try:
            self._outcomes.watch(save.handle)
            self._enqueue(save)
        except BaseException as e:  # else a later save would wait forever for the buffer
            if save not in self.pending:
                self._session.pool.give_back(snapshot.buffer)
                if not isinstance(e, OF_ALL_RANKS):
                    self._refuse(index, step, e)
            raise
        # Last: other ranks may raise it at a later save, and the saves of all ranks stay in step.
        self._outcomes.raise_unseen()
        return save.handle

    def prepare(self, state_dict: Mapping[str, Any]) -> None:
        """After a restore, before the first save: what is restored will be saved, so the ranks
        agree on it now, and buffers are allocated in the background.
        """
        if self._count:
            return
        index = self._next_index()
        try:
            agreed = self._exchange.agree(index, state_dict)
        except BaseException as e:
            if not isinstance(e, OF_ALL_RANKS):
                with contextlib.suppress(StoreError):
                    self._exchange.refuse(index, str(e) or describe(e))
            if not isinstance(e, CheckpointError | ValueError):
                raise
            # The first save raises the same error.
            log.debug("saves were not prepared: %s", e)
        else:
            self._session.pool.preallocate(agreed.structure)

    def seal_all(self) -> None:
        """Seals every snapshot; on the training thread, which writes to no tensor meanwhile."""
        for save in self.pending:
            save.snapshot.seal()

    def _next_index(self) -> int:
        self._count += 1
        return self._count - 1

    def _refuse(self, index: int, step: int, error: BaseException) -> None:
        """Fails a save without a snapshot, so that the other ranks do not wait for this one."""
        self._snapshotter.refuse(index, step, error)
        # If the store is out of reach, it is for them too; this rank's error comes first.
        with contextlib.suppress(StoreError, CheckpointTimeout):
            self._exchange.refuse(index, str(error) or describe(error))
            failure = CallFailure.of(error, index, save_name(step), self._ledger.rank)
            self._ledger.fail(index, failure)
            self._ledger.forget(index)

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
            if not self._protocol.aborted:
                self._outcomes.await_removals()
        finally:
            self._thread_ends.set()

    def _complete(self, save: Save) -> None:
        size_bytes = 0
        manifest: Manifest | None = None
        error: Exception | None = None
        try:
            size_bytes, manifest = self._protocol.carry_out(save)
        except Exception as e:  # noqa: BLE001 - a bug here must not look like a slow save
            error = error_from(save, e)
        with self._lock:
            self._pending.remove(save)
            queued = len(self._pending)
        buffer = save.snapshot.buffer
        if error is None:
            save.snapshot.description["committed"] = True
            done = SnapshotCommitted(buffer=buffer.number, save_id=save.snapshot.save_id)
            self._session.writer.tell(done)
        self._session.pool.give_back(buffer, save.snapshot.turn)
        save.handle._end(error, save.step)
        self._outcomes.ended(save, size_bytes, error, queued)
        # Last, so that nothing waits for it.
        if manifest is not None:
            self._outcomes.apply_retention(manifest)

    # ----------------------------------------------------------------------------- ending

    def abort(self) -> None:
        """Drops all saves in progress, on all ranks. Does not wait: the store may be out of reach.

        Can be called again, because an interrupt may have cut it short.
        """
        self._protocol.aborted = True
        self._outcomes.abandon()
        pending = self.pending
        for save in pending:
            save.snapshot.call_off(SaveCancelled(ABORTED))
        if pending:
            self._session.writer.tell(DropSaves())
            threading.Thread(
                target=self._claim_abort, args=(pending,), name="outlast-abort", daemon=True
            ).start()
        self._queue.put(None)
        self._snapshotter.abandon()

    def check_not_in_callback(self) -> None:
        """Raises `RuntimeError` on the thread of the saves, which cannot wait for its own end."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "close() was called in a callback of a save: call it on the training thread, or "
                "call abort()"
            )

    def finish(self, timeout_s: float | None) -> bool:
        """Ends the thread once all saves have ended; returns whether they have, in time."""
        self._queue.put(None)
        if self._thread is None:
            return True
        # Not `join`: if a signal handler raises in it, CPython 3.11 takes the thread for ended.
        return self._thread_ends.wait(timeout_s)

    def _claim_abort(self, saves: list[Save]) -> None:
        try:
            late = [s for s in saves if not self._ledger.fail(s.index, s.failure(ABORTED))]
            for save in late:
                if not save.handle._await_end(_CONCLUDE_S):
                    result = {"unknown": "rank 0 did not report it before the restart"}
                    self._ledger.conclude(save.index, json.dumps(result).encode())
        except StoreError:
            pass  # the thread of the saves, which waits on the store, gets the same error
