"""The copies of all saves, in rounds: each copy is made by all ranks or by none.

One thread of each rank takes part. The round of save i is calls 2i and 2i + 1 of a ledger:

    2i        each rank is ready: the copy before has ended everywhere, the snapshot is sealed. If
              one is not, no rank copies this save: copies of different saves on different ranks
              would be of no use. The parts are the addresses of the keepers.
    send      each rank's keeper sends the snapshot to the keeper of another failure domain
    2i + 1    all copies are complete, or one has failed. Then every rank releases the copies that
              this makes superfluous, before it is ready for the next round.

Training never waits for any of this. While a copy is sent, its buffer is reserved, and saves use
the others; a save that comes meanwhile is not copied (`CopySkipped`).

Why no torn copy is complete: a buffer is written to only when it is not reserved, and it is
reserved from before the send until the keeper has answered. After a restart in place, reservations
end when the keeper has answered `Arrange`: by then it has called off what it was sending.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import queue
import threading

from outlast.async_checkpoint.peer_copies.arrangement import Arrangement
from outlast.async_checkpoint.peer_copies.keeper import Keeper
from outlast.async_checkpoint.snapshot.buffers import BufferPool
from outlast.async_checkpoint.snapshot.snapshot import Snapshot
from outlast.coordination.call_ledger import CallFailure, CallLedger
from outlast.errors import CheckpointError, StoreError
from outlast.events import CopyCompleted, CopySkipped, Emitter
from outlast.system.error_text import describe

log = logging.getLogger("outlast.checkpoint")

_JOIN_S = 10.0
_CLOSED = "the checkpointer was closed"


@dataclasses.dataclass(frozen=True)
class _Round:
    index: int
    step: int
    snapshot: Snapshot | None
    refusal: str  # why this rank is not ready for it


class CopyRounds:
    """One rank's part in the rounds. `holder` is the rank that holds this rank's copies."""

    def __init__(
        self,
        pool: BufferPool,
        ledger: CallLedger,
        arrangement: Arrangement,
        holder: int,
        emitter: Emitter,
    ) -> None:
        self._keeper = arrangement.keeper
        self._holder = holder
        self._pool = pool
        self._ledger = ledger
        self._arranged = arrangement
        self._emitter = emitter
        self._busy = ""  # what this rank is doing, for those that come meanwhile
        self._closed = False
        self._skipped_before = False
        self._current = -1  # the index of the round in progress
        self._queue: queue.SimpleQueue[_Round | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outlast-copies", daemon=True)
        self._thread.start()

    def submit(self, index: int, step: int, snapshot: Snapshot) -> None:
        """Copies a snapshot, unless a copy is in progress. On the training thread, in the order of
        the saves, on all ranks.
        """
        if self._closed:
            return
        refusal = self._busy
        if not refusal:
            self._busy = f"the copy of step {step} was still being sent"
            self._pool.reserve(snapshot.buffer, snapshot)
        self._queue.put(_Round(index, step, None if refusal else snapshot, refusal))

    def refuse(self, index: int, step: int, cause: str) -> None:
        """A save of which this rank has no snapshot: no rank copies it."""
        if not self._closed:
            self._queue.put(_Round(index, step, None, cause))

    def close(self) -> None:
        """Ends the thread; a copy in progress is dropped, on all ranks."""
        if not self._closed:
            self._closed = True
            self._claim_end()
            self._queue.put(None)

    def join(self) -> None:
        """Waits for the thread, after `close` and the end of the keeper."""
        self._thread.join(_JOIN_S)

    def abandon(self) -> None:
        """As `close`, but does not wait for the store, which may be out of reach."""
        self._closed = True
        self._queue.put(None)
        threading.Thread(target=self._claim_end, name="outlast-abort", daemon=True).start()

    def _claim_end(self) -> None:
        index = self._current
        with contextlib.suppress(StoreError):
            if index >= 0:  # so that no rank waits for this one
                self._ledger.fail(2 * index, self._failure(index, _CLOSED))
                self._ledger.fail(2 * index + 1, self._failure(index, _CLOSED))

    # ------------------------------------------------------------------- on the rounds' thread

    def _run(self) -> None:
        with contextlib.suppress(StoreError):  # the iteration is over, and its store is gone
            while (this := self._queue.get()) is not None:
                self._current = this.index
                if self._closed:  # `close` may have looked before this round began
                    self._claim_end()
                try:
                    began = self._emitter.clock.now()
                    skipped = self._take_part(this)
                finally:
                    self._current = -1
                    if this.snapshot is not None:
                        self._pool.unreserve(this.snapshot.buffer, this.snapshot)
                        self._busy = ""
                # Last: a save that follows the event is copied.
                self._report(this, skipped, self._emitter.clock.now() - began)

    def _take_part(self, this: _Round) -> CallFailure | None:
        """Returns `None` once the copies of all ranks are complete, or why they are not."""
        skipped = self._await_all(this)
        if skipped is None:
            assert this.snapshot is not None
            failure = self._copy(this, this.snapshot)
            call = 2 * this.index + 1
            if failure is None:
                self._ledger.finish(call)
            else:
                self._ledger.fail(call, self._failure(this.index, failure))
            skipped = self._ledger.await_verdict(call, None).failure
            self._ledger.forget(call)
            if not self._closed:  # later, the next checkpointer decides what is kept
                if skipped is None:
                    self._pool.overwritten_last = this.snapshot.description["save_id"]
                    self._keeper.kept = self._pool.overwritten_last
                self._keeper.keep_only(self._keeper.kept)
        self._ledger.forget(2 * this.index)
        return skipped

    def _report(self, this: _Round, skipped: CallFailure | None, seconds: float) -> None:
        before, self._skipped_before = self._skipped_before, skipped is not None
        if skipped is None:
            assert this.snapshot is not None
            self._emitter.emit(
                CopyCompleted(
                    step=this.step,
                    own_bytes=_size_of(this.snapshot) + len(this.snapshot.values),
                    seconds=seconds,
                    held_by=self._arranged.hosts[self._holder],
                )
            )
        elif skipped.cause != _CLOSED:
            cause = f"rank {skipped.rank} on {self._arranged.hosts[skipped.rank]}: {skipped.cause}"
            # The first of several in a row, on the rank that is the cause: each is an event.
            loud = self._ledger.rank == skipped.rank and not before
            log.log(
                logging.WARNING if loud else logging.DEBUG,
                "step %d was not copied to another host's memory: %s",
                this.step,
                cause,
            )
            self._emitter.emit(CopySkipped(step=this.step, cause=cause))

    def _await_all(self, this: _Round) -> CallFailure | None:
        """Waits until all ranks are ready; returns why they do not copy."""
        refusal, snapshot = this.refusal, this.snapshot
        port = 0
        if snapshot is not None:
            snapshot.sealed.wait()
            try:
                if snapshot.error is not None:
                    raise snapshot.error
                port = self._keeper.port()
            except Exception as e:  # noqa: BLE001 - the other ranks wait for this one
                refusal = str(e) if isinstance(e, CheckpointError) else describe(e)
        call = 2 * this.index
        if refusal:
            self._ledger.fail(call, self._failure(this.index, refusal))
        else:
            said = json.dumps([self._arranged.address, port])
            self._ledger.finish(call, said.encode())
        return self._ledger.await_verdict(call, None).failure

    def _copy(self, this: _Round, snapshot: Snapshot) -> str | None:
        """Sends this rank's snapshot; returns why that failed."""
        holder = self._holder
        host = self._arranged.hosts[holder]
        try:
            address, port = json.loads(self._ledger.part(2 * this.index, holder))
            memory, structure = snapshot.buffer.memory, snapshot.buffer.structure
            assert memory is not None
            assert structure is not None
            self._keeper.begin(
                Keeper.send_copy,
                snapshot={**snapshot.description, "index": structure.index.decode()},
                memory=memory,
                address=address,
                port=port,
                blob=snapshot.values,
            ).result(None)
        except StoreError:
            raise
        except Exception as e:  # noqa: BLE001 - the other ranks wait for this one
            cause = str(e) if isinstance(e, CheckpointError) else describe(e)
            return f"the copy to host {host} failed: {cause}"
        return None

    def _failure(self, index: int, cause: str) -> CallFailure:
        line = cause.partition("\n")[0]
        return CallFailure.here(index, f"copy {index}", self._ledger.rank, line)


def _size_of(snapshot: Snapshot) -> int:
    return max((at + size for _, at, size in snapshot.description["layout"]), default=0)
