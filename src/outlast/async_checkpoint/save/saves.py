"""The saves of one rank, in their order: on the training thread, then on a thread of their own.

`Saves.save` runs on the training thread, takes the snapshot, and returns the handle. One thread
then completes the saves one after another: what a save does is in `save.py`; at its end come
buffer, handle, event, and on rank 0 the removal of old checkpoints.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from outlast.async_checkpoint.beside import Beside
from outlast.async_checkpoint.handle import SaveHandle
from outlast.async_checkpoint.policies import FailurePolicy, Retention
from outlast.async_checkpoint.save.folder_session import FolderSession
from outlast.async_checkpoint.save.left_saves import LeftSave
from outlast.async_checkpoint.save.outcomes import SaveOutcomes
from outlast.async_checkpoint.save.round import ABORTED, SaveRound, is_due_to_restart
from outlast.async_checkpoint.save.save import Save
from outlast.async_checkpoint.save.structures import Structures
from outlast.async_checkpoint.snapshot.snapshot import Snapshotter
from outlast.async_checkpoint.state_dict import signature_and_leaves
from outlast.async_checkpoint.storage.manifest import Manifest
from outlast.async_checkpoint.writer.main import Writer
from outlast.coordination.agreement import OF_ALL_RANKS
from outlast.coordination.call_ledger import DIFFERENT_ORDER, CallLedger
from outlast.coordination.waits import waits, works
from outlast.errors import CheckpointError, StoreError, TornSnapshot
from outlast.events.emitter import Emitter
from outlast.system.devices import on_this_device
from outlast.system.error_text import describe
from outlast.system.notices import notice
from outlast.system.parallel import start_thread

log = logging.getLogger("outlast.checkpoint")

_CONCLUDE_S = 10.0  # for rank 0, after an abort that came too late to drop a save


class Saves:
    """One rank's saves. The ids of the saves begin with `job`. `beside` is called for each save, on
    the training thread; `torn` once, on the thread of the saves of all ranks, when the first save
    has failed because a snapshot was torn. From then on, everything is copied at once.
    """

    def __init__(
        self,
        session: FolderSession,
        ledger: CallLedger,
        emitter: Emitter,
        *,
        job: str,
        optimizers: Sequence[Optimizer],
        keep: Retention,
        policy: FailurePolicy | None,
    ) -> None:
        self._session, self._ledger, self._job, self._clock = session, ledger, job, emitter.clock
        self._structures = Structures(session.memo, ledger.rank, ledger.world_size)
        self._snapshotter = Snapshotter(session.writer, optimizers if session.overlaps else ())
        self._aborted = threading.Event()
        self.beside: Callable[[], Beside] = Beside
        self.torn: Callable[[], object] = _nothing
        self.outcomes = SaveOutcomes(session, keep, policy, emitter, self._aborted)
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
        place: str = "",
    ) -> SaveHandle:
        """Takes a snapshot and begins its save. See `Checkpointer.save`."""
        began = self._clock.now()
        save = self._new(step, metric, finite, place, began)
        try:
            self.seal_all()  # interrupted in this wait, too, the save counts and fails on all ranks
            earlier = self.pending
            # On other ranks the earlier save may have ended: this one counts, and fails on all.
            if any(each.step == step for each in earlier):
                raise ValueError(f"step {step} is being saved already: wait for its handle")
            save.snapshot(state_dict, self.beside(), earlier)
            save.blocked_s = self._clock.now() - began
            self.outcomes.watch(save.handle)
            self._enqueue(save)
        except StoreError as e:
            raise CheckpointError(f"the {save.name} failed: {describe(e)}") from e
        except BaseException as e:
            if save not in self.pending and not isinstance(e, OF_ALL_RANKS):
                save.refuse(e)
            raise
        # Last: other ranks may raise it at a later save, and the saves of all ranks stay in step.
        self.outcomes.raise_unseen(saved_again=True)
        return save.handle

    def resume_left(
        self,
        left: Sequence[LeftSave],
        sync: Callable[[], object] = lambda: None,
        finite: Collection[str] = (),
    ) -> list[SaveHandle | None]:
        """Completes saves that were cut off, after a restore and `prepare`, on all ranks; `sync` as
        in `Beside`. Returns their handles, `None` if a rank has lost its snapshot.
        """
        for each in left if self._ledger.rank == 0 else ():
            if each.is_whole:
                notice(log, "completing the save of step %d, which a fault had cut off", each.step)
        return [self._resume(each, sync, finite) if each.is_whole else None for each in left]

    def _resume(
        self, left: LeftSave, sync: Callable[[], object], finite: Collection[str]
    ) -> SaveHandle:
        """If it cannot be completed, its handle has the error, and no later save raises it."""
        save = self._new(left.step, left.metric, finite, left.place, self._clock.now())
        try:
            save.adopt(left.save_id, sync)
        except CheckpointError as e:
            save.refuse(e)
            save.handle._end(save.round.own_error(e), left.step)
            log.warning("the save of step %d was not completed: %s", left.step, e)
        else:
            self._enqueue(save)
        return save.handle

    def prepare(self, present: Callable[[], Mapping[str, Any]]) -> None:
        """After a restore, before the first save: what is restored, the `present` state, will be
        saved, so the ranks agree on it now, unless they have before the restart; and buffers are
        allocated in the background.
        """
        if self._count:
            return
        if self._structures.go_on(present):
            if self._structures.present is not None:  # the restart has ended their allocation
                self._session.pool.preallocate(self._structures.present)
            return
        agreement = self._round(self._next_index(), "preparation of saves")
        try:
            signature = signature_and_leaves(state_dict := present())[0]
            structure = self._structures.agree(state_dict, signature, agreement)
            agreement.forget()
        except BaseException as e:
            if not isinstance(e, OF_ALL_RANKS):
                with contextlib.suppress(StoreError):
                    agreement.refuse(e)
            if not isinstance(e, CheckpointError | ValueError) or DIFFERENT_ORDER in str(e):
                raise
            # The first save raises the same error.
            log.debug("saves were not prepared: %s", e)
        else:
            self._session.pool.preallocate(structure)

    def seal_all(self) -> None:
        """Seals every snapshot; on the training thread, which writes to no tensor meanwhile."""
        for save in self.pending:
            save.seal()

    def _new(
        self, step: int, metric: float | None, finite: Collection[str], place: str, began: float
    ) -> Save:
        index = self._next_index()
        return Save(
            self._session,
            self._structures,
            self._snapshotter,
            self._aborted,
            self._round(index, f"save of step {step}", place),
            id=f"{self._job}{index:08x}",
            index=index,
            step=step,
            metric=metric,
            finite=finite,
            place=place,
            began=began,
        )

    def _round(self, index: int, name: str, place: str = "") -> SaveRound:
        timeout_s = self._session.writer.timeout_s
        return SaveRound(self._ledger, index, name, self._structures.divide, timeout_s, place)

    def _next_index(self) -> int:
        self._count += 1
        return self._count - 1

    def _enqueue(self, save: Save) -> None:
        with self._lock:
            self._pending.append(save)
        if self._thread is None:
            run = on_this_device(self._run)
            self._thread = threading.Thread(target=run, name="outlast-saver", daemon=True)
            self._thread.start()
        self._queue.put(save)

    # ------------------------------------------------------------- on the thread of the saves

    def _run(self) -> None:
        try:
            while (save := self._queue.get()) is not None:
                with works(self):
                    self._complete(save)
            if not self._aborted.is_set():
                with works(self):
                    self.outcomes.await_removals()
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
            if error is not None and is_due_to_restart(error) and not self._aborted.is_set():
                self._cut_off(save)  # another rank was the first to drop it
            if isinstance(error, TornSnapshot):
                self._snapshotter.abandon()
            self._pending.remove(save)
            queued = len(self._pending)
        taken, session = save.taken, self._session
        assert taken is not None
        if error is None:
            taken.description["committed"] = True
            number, taken.description["final"] = taken.buffer.number, save.final
            tell = session.writer.tell
            tell(Writer.committed, buffer=number, save_id=taken.save_id, final=save.final)
        session.pool.give_back(taken.buffer, taken.turn)
        if isinstance(error, TornSnapshot):
            torn, self.torn = self.torn, _nothing
            torn()
        save.handle._end(error, save.step)
        self.outcomes.ended(save, size_bytes, error, queued)
        # Last, so that nothing waits for it.
        if manifest is not None:
            self.outcomes.apply_retention(manifest)

    # ----------------------------------------------------------------------------- ending

    def wait(self, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for save in self.pending:
            save.handle.result(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        self.outcomes.raise_unseen()

    def abort(self) -> None:
        """Drops all saves in progress, on all ranks. Does not wait: the store may be out of reach.

        Can be called again, because an interrupt may have cut it short.
        """
        with self._lock:
            self._aborted.set()
            pending = list(self._pending)
            for save in pending:
                self._cut_off(save)
        for save in pending:
            if save.taken is not None:
                save.taken.call_off()
        if pending:
            self._session.writer.tell(Writer.drop_saves)
            start_thread("outlast-abort", self._claim_abort, pending)
        self._queue.put(None)
        if self._session.copies is not None:
            self._session.copies.abandon()
        self._snapshotter.abandon()

    def _cut_off(self, save: Save) -> None:
        """The next checkpointer may complete it. Called with the lock, and not after `abort`: the
        next one may have looked by then.
        """
        if save.taken is not None:
            self._session.dropped[save.taken.save_id] = save.taken.description

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
        with waits():
            return self._thread_ends.wait(timeout_s)

    def _claim_abort(self, saves: list[Save]) -> None:
        try:
            late = [save for save in saves if not save.round.fail(save.round.failure(ABORTED))]
            for save in late:
                if not save.handle._await_end(_CONCLUDE_S):
                    save.round.conclude({"unknown": "rank 0 did not report it before the restart"})
        except StoreError:
            pass  # the thread of the saves, which waits on the store, gets the same error


def _nothing() -> None:
    """The `torn` of saves that no `Job` makes, or of which it has learned."""
