"""The way of a save, after the snapshot: written by all ranks, then committed by one.

One thread of each rank walks the saves through it, one after another:

    agree       who saves what (`exchange`); that all ranks are at the same save
    write       the writer process has this rank's bytes durable, with their checksums; it writes
                beside the copy, what has been copied
    sealed      the snapshot is whole: the state of the moment of the save
    verdict     all ranks have, or one has failed: the ledger says the same to every rank
    commit      rank 0: the manifest, then the rename
    conclusion  rank 0 says what came of it

Nothing before the commit makes anything visible. Why a checkpoint is never committed and dropped
at once: both need the verdict of the save, which is claimed once. An abort claims it as a failure;
if that wins, nobody commits. If "all are durable" won, the abort has come too late, and the commit
goes on, on rank 0 and for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import threading
from collections.abc import Callable
from typing import Any

from outlast.async_checkpoint.handle import SaveHandle
from outlast.async_checkpoint.save.folder_session import FolderSession, SnapshotBuffer
from outlast.async_checkpoint.save.structure_exchange import StructureExchange
from outlast.async_checkpoint.snapshot.copy_overlapped import OverlappedCopy
from outlast.async_checkpoint.state_dict.catalog import Catalog
from outlast.async_checkpoint.storage.manifest import (
    CHUNK_BYTES,
    MANIFEST,
    FileEntry,
    Manifest,
    checksum,
    encode,
    pieces,
)
from outlast.async_checkpoint.writer.client import WriterFailed
from outlast.async_checkpoint.writer.messages import (
    BeginSave,
    Commit,
    DropSaves,
    RemoveFolders,
    SnapshotCommitted,
    WriteSnapshot,
)
from outlast.async_checkpoint.writer.write_files import Dropped
from outlast.coordination import KeyTimeout
from outlast.coordination.call_failure import CallFailure, Verdict
from outlast.coordination.call_ledger import CallLedger
from outlast.errors import CheckpointError, OutlastError, StoreError

__all__ = ["METADATA", "Save", "SavePipeline"]

METADATA = ".metadata"
_ABORTED = "aborted: it was dropped for all ranks"
# After an abort that came too late to drop a save: how long rank 0 has to say what came of it.
_LAST_WORD_S = 10.0


@dataclasses.dataclass
class Save:
    """A save that is under way. `catalog` is set on rank 0, here or when all ranks have agreed."""

    index: int
    step: int
    metric: float | None
    handle: SaveHandle
    buffer: SnapshotBuffer
    snapshot: dict[str, Any]
    values: bytes
    places: list[list[int]]
    changed: bool
    catalog: Catalog | None
    copy: OverlappedCopy | None = None
    turn: int = 0
    hashed: bool = False
    sealed: threading.Event = dataclasses.field(default_factory=threading.Event)
    torn: CheckpointError | None = None
    blocked_s: float = 0.0
    began: float = 0.0


class SavePipeline:
    """The thread that saves go through.

    Args:
        session: of the folder.
        ledger: of the saves: call i is save i.
        exchange: of the structures.
        committed: called on rank 0, on this thread, when a save has ended well: nobody waits.
        ended: called on every rank when a save has ended, with its size in bytes, its error, and
            how many are still under way.
        drained: called when there will be no more saves, unless they were aborted.
        timeout_s: how long to wait for other ranks, in seconds.
    """

    def __init__(
        self,
        session: FolderSession,
        ledger: CallLedger,
        exchange: StructureExchange,
        committed: Callable[[Manifest], None],
        ended: Callable[[Save, int, Exception | None, int], None],
        drained: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._timeout = timeout_s
        self._session = session
        self._ledger = ledger
        self._exchange = exchange
        self._committed = committed
        self._ended = ended
        self._drained = drained
        self._queue: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._pending: list[Save] = []
        self._lock = threading.Lock()
        self._aborted = False
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> list[Save]:
        """The saves that have not ended, oldest first."""
        with self._lock:
            return list(self._pending)

    def add(self, save: Save) -> None:
        """Takes a save on its way."""
        with self._lock:
            self._pending.append(save)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outlast-saver", daemon=True)
            self._thread.start()
        self._queue.put(save)

    def refuse(self, index: int, step: int, error: Exception) -> None:
        """Fails a save of which there is no snapshot, so that the other ranks do not wait."""
        name = f"save of step {step}"
        self._ledger.fail(index, CallFailure.of(error, index, name, self._ledger.rank))
        self._ledger.forget(index)

    def abort(self) -> None:
        """Drops what is under way, for all ranks. Does not wait: the store may be out of reach.

        Can be called again: an interrupt may have come in the middle of it.
        """
        self._aborted = True
        pending = self.pending
        for save in pending:
            if save.copy is not None:
                save.copy.call_off()
            if not save.sealed.is_set():  # an interrupt has come between the copy and its seal
                save.torn = CheckpointError(_ABORTED)
                save.sealed.set()
        if pending:
            self._session.writer.tell(DropSaves())
            threading.Thread(
                target=self._drop, args=(pending,), name="outlast-abort", daemon=True
            ).start()
        self._queue.put(None)

    def finish(self, timeout_s: float | None) -> bool:
        """Ends the thread once all saves have ended; says whether they have, in time."""
        self._queue.put(None)
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _drop(self, saves: list[Save]) -> None:
        try:
            late = [s for s in saves if not self._ledger.fail(s.index, self._failure(s, _ABORTED))]
            for save in late:
                if not save.handle._await_end(_LAST_WORD_S):
                    said = json.dumps({"error": "rank 0 did not say whether it was committed"})
                    self._ledger.conclude(save.index, said.encode())
        except StoreError:
            pass  # then the thread that waits on it has been told as well

    def _run(self) -> None:
        while (save := self._queue.get()) is not None:
            error: Exception | None = None
            manifest: Manifest | None = None
            size_bytes = 0
            try:
                size_bytes, manifest = self._walk(save)
            except (OutlastError, OSError) as e:
                error = e
            except Exception as e:  # noqa: BLE001 - a defect of ours must not look like a save that takes long
                error = CheckpointError(f"the save of step {save.step} failed: {e!r}")
                error.__cause__ = e
            with self._lock:
                self._pending.remove(save)
                queued = len(self._pending)
            if error is None:
                save.snapshot["committed"] = True
                committed = SnapshotCommitted(
                    buffer=save.buffer.number, save_id=save.snapshot["save_id"]
                )
                self._session.writer.tell(committed)
            self._session.give_back(save.buffer, save.turn)
            save.handle._end(error)
            self._ended(save, size_bytes, error, queued)
            if manifest is not None and not self._aborted:
                self._committed(manifest)
        if not self._aborted:
            self._drained()

    def _walk(self, save: Save) -> tuple[int, Manifest | None]:
        """Returns the bytes of the checkpoint, and on rank 0 its manifest."""
        ledger, index = self._ledger, save.index
        try:
            if not save.changed:
                save.catalog = self._exchange.unchanged(index) or save.catalog
            ledger.announce(index, f"save of step {save.step}")
            part = self._write(save)
        except StoreError:
            raise
        except Exception as e:  # noqa: BLE001 - whatever it is, all ranks must know
            ledger.fail(index, self._failure_of(save, e))
            part = None
        if part is not None:
            ledger.finish(index, json.dumps(part, separators=(",", ":")).encode())
        verdict = self._verdict(save)
        if verdict.failure is not None:
            # Rank 0 for all; but a rank that was at another save has a folder of its own.
            if ledger.rank == 0 or verdict.failure.name != _name(save):
                self._clean(save)
            ledger.forget(index)
            raise _error(verdict.failure)
        manifest: Manifest | None = None
        if ledger.rank == 0:
            manifest, result = self._commit(save)
            try:
                ledger.conclude(index, json.dumps(result).encode())
            except StoreError:
                # The store has gone, with the job's iteration; what is committed is, all the same.
                # The next checkpointer may be at work already: nothing old is removed beside it.
                if manifest is None:
                    raise
                return manifest.size_bytes, None
        else:
            try:
                result = json.loads(ledger.await_conclusion(index, self._timeout))
            except KeyTimeout:
                result = {"error": f"rank 0 did not say within {self._timeout:g} s whether it was"}
            except StoreError as e:
                text = f"step {save.step}: rank 0 could not say whether it is committed: {e}"
                raise CheckpointError(text) from e
        with contextlib.suppress(StoreError):  # gone meanwhile, and its keys with it
            ledger.forget(index)
        if "error" in result:
            raise CheckpointError(
                f"the save of step {save.step} was not committed: {result['error']}"
            )
        return int(result["size_bytes"]), manifest

    def _verdict(self, save: Save) -> Verdict:
        try:
            return self._ledger.await_verdict(save.index, self._timeout)
        except KeyTimeout:
            cause = f"not all ranks had written their parts within {self._timeout:g} s"
            self._ledger.fail(save.index, self._failure(save, cause))
            return self._ledger.await_verdict(save.index, None)  # there is one now

    def _write(self, save: Save) -> dict[str, Any]:
        snapshot = save.snapshot
        request = WriteSnapshot(
            buffer=save.buffer.number,
            save_id=snapshot["save_id"],
            folder=snapshot["working"],
            files=snapshot["layout"],
            values_file=snapshot["values"],
            hashed=save.hashed,
            blob=save.values,
        )
        try:
            with (
                self._session.writer.exclusive
            ):  # no other checkpointer's `BeginSave` comes between
                self._session.writer.request(BeginSave())
                if self._aborted:
                    raise Dropped
                answer = self._session.writer.request(request)
        finally:
            # Also where it has failed: only then is nothing copied any more, and no hook left. And
            # a torn snapshot is the first cause of its save's being dropped.
            save.sealed.wait()
            if save.torn is not None:
                raise save.torn
        # Who has copied the snapshot has its checksums, or the writer has taken them.
        files = snapshot["files"] if save.hashed else answer.files
        return {"files": files, "places": save.places, "id": snapshot["save_id"]}

    def _commit(self, save: Save) -> tuple[Manifest | None, dict[str, Any]]:
        """The manifest, if it is committed, and what rank 0 says of it: `size_bytes` or `error`."""
        try:
            manifest, files = self._gather(save)
            self._session.writer.request(
                Commit(
                    working=save.snapshot["working"],
                    final=save.snapshot["final"],
                    files=[(name, len(content)) for name, content in files],
                    blob=b"".join(content for _, content in files),
                )
            )
        except (OutlastError, OSError, Dropped) as e:
            self._clean(save)
            return None, {"error": f"rank 0 could not commit it: {str(e) or 'it was dropped'}"}
        return manifest, {"size_bytes": manifest.size_bytes}

    def _gather(self, save: Save) -> tuple[Manifest, list[tuple[str, bytes]]]:
        catalog = save.catalog
        assert catalog is not None
        files: dict[str, FileEntry] = {}
        places = {}
        for rank, part in enumerate(self._ledger.parts(save.index)):
            told = json.loads(part)
            if told["id"] != save.snapshot["save_id"]:
                raise CheckpointError(f"rank {rank} wrote into another folder: {told['id']}")
            places[rank] = told["places"]
            for name, entry in told["files"].items():
                files[name] = FileEntry(name, entry["size_bytes"], entry["checksums"])
        values = catalog.values(places)
        metadata = catalog.metadata(values)
        files[METADATA] = FileEntry(
            METADATA,
            len(metadata),
            [checksum(metadata[at : at + n]) for at, n in pieces(len(metadata))],
        )
        manifest = Manifest(
            step=save.step,
            save_id=save.snapshot["save_id"],
            world_size=self._ledger.world_size,
            metric=save.metric,
            chunk_bytes=CHUNK_BYTES,
            files=files,
            tensors=catalog.tensors,
            values=values,
        )
        return manifest, [(METADATA, metadata), (MANIFEST, encode(manifest))]

    def _clean(self, save: Save) -> None:
        """Removes what a save that failed has left. If that fails too, the next job does it."""
        with contextlib.suppress(WriterFailed, Dropped):
            self._session.writer.request(RemoveFolders(folders=[save.snapshot["working"]]))

    def _failure(self, save: Save, cause: str) -> CallFailure:
        return CallFailure.here(save.index, _name(save), self._ledger.rank, cause)

    def _failure_of(self, save: Save, error: Exception) -> CallFailure:
        if isinstance(error, Dropped):
            return self._failure(save, _ABORTED)
        if isinstance(error, WriterFailed):
            return CallFailure.here(
                save.index, _name(save), self._ledger.rank, str(error), error.remote_traceback
            )
        if isinstance(error, OutlastError):
            return self._failure(save, str(error))
        return CallFailure.of(error, save.index, _name(save), self._ledger.rank)


def _name(save: Save) -> str:
    return f"save of step {save.step}"


def _error(failure: CallFailure) -> CheckpointError:
    text = f"the {failure.name} failed on rank {failure.rank} on {failure.host}: {failure.cause}"
    return CheckpointError(f"{text}\n{failure.traceback.rstrip()}" if failure.traceback else text)
