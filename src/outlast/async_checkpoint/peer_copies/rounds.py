"""The copies of all saves, in rounds: each copy is made by all ranks or by none.

One thread of each rank takes part. The copies of a save are two rounds of a ledger:

    ready     each rank is ready: the copy before has ended everywhere, the snapshot is sealed. If
              one is not, no rank copies this save: copies of different saves on different ranks
              would be of no use. The parts are the addresses of the keepers.
    send      each rank's keeper sends the snapshot to the keeper of another failure domain
    done      all copies are complete, or one has failed. Then every rank releases the copies that
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
from collections.abc import Callable
from functools import partial

from outlast.async_checkpoint.peer_copies.arrangement import Arrangement
from outlast.async_checkpoint.peer_copies.keeper import Keeper
from outlast.async_checkpoint.snapshot.buffers import BufferPool
from outlast.async_checkpoint.snapshot.snapshot import Snapshot
from outlast.coordination.call_ledger import CallFailure, CallLedger, Round
from outlast.coordination.waits import waits, works
from outlast.errors import CheckpointError, StoreError
from outlast.events.emitter import Emitter
from outlast.events.types import CopyCompleted, CopySkipped
from outlast.system.error_text import describe
from outlast.system.parallel import start_thread

log = logging.getLogger("outlast.checkpoint")

_JOIN_S = 10.0
_CLOSED = "the checkpointer was closed"


@dataclasses.dataclass(frozen=True)
class _Save:
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
        self._holder, self._pool, self._ledger = holder, pool, ledger
        self._arranged = arrangement
        self._emitter = emitter
        self._busy = ""  # what this rank is doing, for those that come meanwhile
        self._closed = False
        self._skipped_before = False
        self._current = -1  # the index of the round in progress
        self._queue: queue.SimpleQueue[_Save | None] = queue.SimpleQueue()
        self._thread = start_thread("outlast-copies", self._run)

    def submit(self, index: int, step: int, snapshot: Snapshot) -> None:
        """Copies a snapshot unless a copy is in progress. On all training threads, in order."""
        if self._closed:
            return
        refusal = self._busy
        if not refusal:
            self._busy = f"the copy of step {step} was still being sent"
            self._pool.reserve(snapshot.buffer, snapshot)
        self._queue.put(_Save(index, step, None if refusal else snapshot, refusal))

    def refuse(self, index: int, step: int, cause: str) -> None:
        """A save of which this rank has no snapshot: no rank copies it."""
        if not self._closed:
            self._queue.put(_Save(index, step, None, cause))

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
        start_thread("outlast-abort", self._claim_end)

    def _claim_end(self) -> None:
        index = self._current
        if index >= 0:  # so that no rank waits for this one
            with contextlib.suppress(StoreError):
                for each in ("ready", "done"):
                    self._ledger.round(index, each).fail(self._failure(index, _CLOSED))

    # ------------------------------------------------------------------- on the rounds' thread

    def _run(self) -> None:
        with contextlib.suppress(StoreError):  # the iteration is over, and its store is gone
            while (current := self._queue.get()) is not None:
                self._current = current.index
                if self._closed:  # `close` may have looked before this round began
                    self._claim_end()
                try:
                    began = self._emitter.clock.now()
                    with works(self):  # a save may wait for the buffer
                        skipped = self._take_part(current)
                finally:
                    self._current = -1
                    if current.snapshot is not None:
                        self._pool.unreserve(current.snapshot.buffer, current.snapshot)
                        self._busy = ""
                # Last: a save that follows the event is copied.
                self._report(current, skipped, self._emitter.clock.now() - began)

    def _take_part(self, current: _Save) -> CallFailure | None:
        """Returns `None` once the copies of all ranks are complete, or why they are not."""
        ready = self._ledger.round(current.index, "ready")
        skipped = self._finish(ready, current, partial(self._get_ready, current))
        if skipped is None:
            assert current.snapshot is not None
            snapshot = current.snapshot
            done = self._ledger.round(current.index, "done")
            skipped = self._finish(done, current, partial(self._copy, ready, snapshot))
            done.forget()
            if not self._closed:  # later, the next checkpointer decides what is kept
                if skipped is None:
                    self._pool.overwritten_last = self._keeper.kept = snapshot.save_id
                self._keeper.keep_only(self._keeper.kept)
        ready.forget()
        return skipped

    def _finish(
        self, round_: Round, current: _Save, work: Callable[[], bytes | None]
    ) -> CallFailure | None:
        """Reports a round done by `work`, or failed; waits for all ranks; returns why it failed."""
        try:
            round_.finish(work())
        except StoreError:
            raise
        except Exception as e:  # noqa: BLE001 - the other ranks wait for this one
            cause = str(e) if isinstance(e, CheckpointError) else describe(e)
            round_.fail(self._failure(current.index, cause))
        return round_.await_verdict(None).failure

    def _get_ready(self, current: _Save) -> bytes:
        """Waits until this rank can take part; returns the address of its keeper."""
        if current.snapshot is None:
            raise CheckpointError(current.refusal)
        with waits():
            current.snapshot.sealed.wait()
        if current.snapshot.error is not None:
            raise current.snapshot.error
        return json.dumps([self._arranged.address, self._keeper.port()]).encode()

    def _copy(self, ready: Round, snapshot: Snapshot) -> None:
        memory, structure = snapshot.buffer.memory, snapshot.buffer.structure
        assert memory is not None
        assert structure is not None
        try:
            address, port = json.loads(ready.part(self._holder))
            self._keeper.begin(
                Keeper.send_copy,
                snapshot={**snapshot.description, "index": structure.index},
                memory=memory,
                address=address,
                port=port,
                blob=snapshot.values,
            ).result(None)
        except (CheckpointError, ValueError) as e:
            host = self._arranged.hosts[self._holder]
            raise CheckpointError(f"the copy to host {host} failed: {e}") from e

    def _report(self, current: _Save, skipped: CallFailure | None, seconds: float) -> None:
        before, self._skipped_before = self._skipped_before, skipped is not None
        if skipped is None:
            assert current.snapshot is not None
            self._emitter.emit(
                CopyCompleted(
                    step=current.step,
                    own_bytes=current.snapshot.size_bytes,
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
                current.step,
                cause,
            )
            self._emitter.emit(CopySkipped(step=current.step, cause=cause))

    def _failure(self, index: int, cause: str) -> CallFailure:
        line = cause.partition("\n")[0]
        return CallFailure.here(index, f"copy {index}", self._ledger.rank, line)
