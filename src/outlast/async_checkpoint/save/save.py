"""One save of one rank, from the state dict to the end: `snapshot`, `write`, `commit`.

    snapshot   on the training thread: this rank's share of the state is copied into a buffer
    write      the writer process makes this rank's files durable, during a copy that overlaps
               with training; the rank is done once they are, and the snapshot is sealed
    commit     once all ranks are done: rank 0 writes the manifest and renames the folder, and
               tells the others

Nothing before the commit makes anything visible. A checkpoint is never both committed and dropped:
either needs the verdict of the save, which is claimed once. An abort claims a failure; if that
claim wins, no rank commits. If "all ranks are done" won, the abort came too late, and the commit
continues, on rank 0 and for all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from outlast.async_checkpoint.beside import Beside, differing
from outlast.async_checkpoint.finite import not_finite_in
from outlast.async_checkpoint.handle import SaveHandle
from outlast.async_checkpoint.observers import notify
from outlast.async_checkpoint.save.folder_session import FolderSession
from outlast.async_checkpoint.save.round import ABORTED, SaveRound
from outlast.async_checkpoint.save.structures import METADATA, Catalog, Structures
from outlast.async_checkpoint.snapshot.buffers import NoFreeBuffer, SnapshotBuffer
from outlast.async_checkpoint.snapshot.snapshot import Snapshot, Snapshotter
from outlast.async_checkpoint.snapshot.structure import Structure, values_file
from outlast.async_checkpoint.state_dict import signature_and_leaves
from outlast.async_checkpoint.storage.manifest import MANIFEST, Manifest, decode, encode, saved_by
from outlast.async_checkpoint.writer.client import ProcessFailed
from outlast.async_checkpoint.writer.handover import SnapshotDescription
from outlast.async_checkpoint.writer.main import Writer
from outlast.async_checkpoint.writer.write_files import Dropped
from outlast.coordination.call_ledger import CallFailure
from outlast.coordination.waits import waits
from outlast.errors import (
    CheckpointError,
    CheckpointTimeout,
    OutlastError,
    StoreError,
    TornSnapshot,
)
from outlast.system.error_text import describe, drop_tracebacks
from outlast.system.main_program import without_collections

_DROPPED = "dropped for all ranks by rank 0, while it was being committed"


@dataclasses.dataclass(eq=False)
class Save:
    """See the module. All saves of a checkpointer have the same `session`, `structures`,
    `snapshotter` and `aborted`, which any thread sets, once, when all of them are dropped.

    Attributes:
        id: names its folder; no other save has it.
        index: of the save in its checkpointer, the same on all ranks.
        metric: of the checkpoint, for `Retention(best=...)`.
        finite: the names of tensors whose values must be finite.
        place: where the training is, in words; differs between ranks that are not at the same one.
        name: in messages; differs between ranks that save different steps.
        taken: the snapshot, if there is one.
        began, blocked_s: when `Checkpointer.save` was called, and how long training waited.
    """

    session: FolderSession
    structures: Structures
    snapshotter: Snapshotter
    aborted: threading.Event
    round: SaveRound
    id: str
    index: int
    step: int
    metric: float | None
    finite: Collection[str]
    place: str
    began: float

    def __post_init__(self) -> None:
        self.name = self.round.name
        self.working, self.final = self.session.storage.names_for(self.step, self.id)
        self.handle = SaveHandle(self.step)
        self.taken: Snapshot | None = None
        self.blocked_s = 0.0
        _, self._rank, self._world_size = self.session.memo.ranks
        self._beside = Beside()
        self._structure = ""  # the digest of what is saved
        self._catalog: Catalog | None = None  # of a rank alone

    # --------------------------------------------------------------- on the training thread

    def snapshot(
        self, state_dict: Mapping[str, Any], beside: Beside, earlier: Sequence[Save]
    ) -> None:
        """Takes the snapshot of `state_dict` as it is now; `earlier` saves are in progress."""
        session, structures, timeout_s = self.session, self.structures, self._timeout_s
        self._beside = beside
        signature, leaves = without_collections(partial(signature_and_leaves, state_dict))
        structure = structures.known(signature)
        if structure is None:
            # On rank 0, none of them may use the catalog while it changes.
            waits_for = earlier if self._rank == 0 and self._world_size > 1 else ()
            if not all(save.handle._await_end(timeout_s) for save in waits_for):
                raise self._not_begun(earlier)
            structure = structures.agree(state_dict, signature, self.round)
        self._structure = structure.digest
        if self._world_size == 1:
            self._catalog = structures.catalog  # the next save may replace it
        try:
            buffer = session.pool.take(structure, timeout_s)
        except NoFreeBuffer:
            raise self._not_begun(earlier) from None
        try:
            values, places = structure.pickle_values(state_dict)
            description = self._describe(structure, values, places)
            notify("saving")
            given = description, values, buffer, structure, leaves
            self.taken = without_collections(partial(self.snapshotter.take, *given))
            self.handle._seal = self.taken.seal
        except BaseException:
            session.pool.give_back(buffer)
            raise
        if session.copies is not None:
            session.copies.submit(self.index, self.step, self.taken)
        session.pool.release_handed_over()
        session.dropped.clear()

    def adopt(self, save_id: str, sync: Callable[[], object]) -> None:
        """Takes the snapshot of a save that was cut off: see `left_saves.py`."""
        pool, structure = self.session.pool, self.structures.present
        buffer = None if structure is None else pool.take_left(save_id, structure)
        if structure is None:
            raise CheckpointError("the ranks have not agreed on what they save now")
        if buffer is None or buffer.snapshot is None:
            held = [b for b in pool.all_buffers if b.snapshot is not None]
            left = [b for b in held if b.snapshot and b.snapshot["save_id"] == save_id]
            raise CheckpointError(f"its snapshot {_why_unusable(left, structure)}")
        self._structure, self._beside = structure.digest, Beside(sync)
        if self._world_size == 1:
            self._catalog = self.structures.catalog
        self.taken = Snapshot(
            buffer.snapshot, buffer.values, buffer, self.session.writer, is_sealed=True
        )

    def seal(self) -> None:
        """Waits for the copy of the snapshot, where no write to the tensors is in progress; if it
        is torn, until the save has failed, and later ones are copied at once.
        """
        if self.taken is not None:
            self.taken.seal()
            if isinstance(self.taken.error, TornSnapshot):
                self.handle._await_end(self._timeout_s)

    def refuse(self, error: BaseException) -> None:
        """Fails a save that cannot go on, so that the other ranks do not wait for this one."""
        session = self.session
        if self.taken is not None:
            session.pool.give_back(self.taken.buffer, self.taken.turn)
        elif session.copies is not None:
            session.copies.refuse(self.index, self.step, str(error))
        # If the store is out of reach, it is for them too; this rank's error comes first.
        with contextlib.suppress(StoreError):
            self.round.refuse(error)

    def _not_begun(self, earlier: Sequence[Save]) -> CheckpointTimeout:
        """The error of a save that cannot begin, because earlier ones use all buffers."""
        steps, url = ", ".join(str(save.step) for save in earlier), self.session.url
        return CheckpointTimeout(
            f"the {self.name} could not begin: rank {self._rank} waited {self._timeout_s:g} s for "
            f"a free snapshot buffer while step {steps} was being written to {url} "
            "(the disk may not respond)"
        )

    def _describe(
        self, structure: Structure, values: bytes, places: list[list[int]]
    ) -> SnapshotDescription:
        return {
            "step": self.step,
            "number": self.index,
            "save_id": self.id,
            "metric": None if self.metric is None else float(self.metric),
            "place": self.place,
            "structure": structure.digest,
            "folder_id": self.session.identity,
            "rank": self._rank,
            "world_size": self._world_size,
            "working": self.working,
            "final": self.final,
            "layout": structure.files,
            "values": values_file(self._rank) if values else "",
            "places": places,
            "socket": str(self.session.own_socket),
        }

    # ------------------------------------------------------------- on the thread of the saves

    def complete(self) -> tuple[int, Manifest | None]:
        """Writes and commits; the size, and on rank 0 the manifest if old checkpoints may go."""
        late = False
        outcome: str | CallFailure
        try:
            self.round.begin()
            outcome = self.write()
        except StoreError:
            raise
        except Exception as e:  # noqa: BLE001 - every rank must know of any error
            late = isinstance(e, CheckpointTimeout)
            if self.taken is not None and e is self.taken.error and not self.aborted.is_set():
                # torch's join() writes to the parameters, for one.
                self.round.await_announcements()
            # Whatever it is, an abort has caused it, if there is one: that kills the writer.
            outcome = self.round.failure(ABORTED if self.aborted.is_set() else e)
            drop_tracebacks(e)  # it may stay in the snapshot: see `SaveRound.own_error`
        failure = self.round.report(outcome)
        if failure is None:
            return self.commit()
        # Rank 0 does it for all; but a rank that was at another save has its own folder.
        # A disk that did not respond is not asked again: the next job removes what is there.
        if not late and (self._rank == 0 or failure.name != self.name):
            self._remove_files()
        with contextlib.suppress(StoreError):  # another rank may have restarted already
            self.round.forget()
        raise self.round.error(failure, late)

    def write(self) -> str:
        """Makes this rank's files durable; returns its record, for the manifest."""
        snapshot, writer = self.taken, self.session.writer
        assert snapshot is not None
        description = snapshot.description
        try:
            with writer.exclusive:  # no `begin_save` of another checkpointer in between
                writer.begin_save()
                if self.aborted.is_set():
                    raise Dropped
                files = writer.request(
                    Writer.write_snapshot,
                    buffer=snapshot.buffer.number,
                    save_id=snapshot.save_id,
                    folder=self.working,
                    files=description["layout"],
                    values_file=description["values"],
                    hashed=snapshot.hashed,
                    blob=snapshot.values,
                )
        finally:
            # Even after an error: once the snapshot is sealed, nothing is being copied, and no hook
            # is left. If it is torn, that is why its save was dropped.
            with waits():  # for a step of training
                snapshot.sealed.wait()
            if snapshot.error is not None:
                raise snapshot.error
        self._beside.sync()
        record: dict[str, Any] = {
            "step": self.step,
            "id": self.id,
            "structure": self._structure,
            "files": description.get("files") if snapshot.hashed else files,
            "places": description["places"],
        }
        if self._beside.digests:
            record["digests"] = dict(self._beside.digests)
        if self.finite:
            record["non_finite"] = not_finite_in(snapshot.buffer, self.finite)
        return json.dumps(record, separators=(",", ":"))

    def commit(self) -> tuple[int, Manifest | None]:
        """Makes the checkpoint visible, on rank 0; others wait until rank 0 has. See `complete`."""
        manifest: Manifest | None = None
        if self._rank == 0:
            manifest, result = self._publish()
            try:
                self.round.conclude(result)
            except StoreError:
                if manifest is None:
                    raise
                # The store is gone, and the job's iteration with it; the checkpoint is committed
                # anyway. The next checkpointer may be running: nothing old is removed.
                return manifest.size_bytes, None
        else:
            notify("committing")
            result = self.round.await_conclusion()
        with contextlib.suppress(StoreError):  # the store is gone, and its keys with it
            self.round.forget()
        if "size_bytes" not in result:
            raise self.round.error_of_commit(result)
        self._beside.committed(result.get("differing", {}))
        return int(result["size_bytes"]), manifest

    def _publish(self) -> tuple[Manifest | None, dict[str, Any]]:
        """Writes the manifest and renames the folder. Returns the manifest, if the checkpoint is
        committed, and the result for the other ranks: the `size_bytes` of the checkpoint, or why it
        is not committed (`error`, `dropped`), or may not be (`unknown`).
        """
        session = self.session
        manifest: Manifest | None = None
        records: list[bytes] = []
        try:
            catalog = self._catalog or self.structures.catalog
            records = self.round.records()
            manifest, metadata = catalog.manifest(records, self.step, self.id, self.metric)
            content = encode(manifest)
            if not catalog.is_readable:  # once: it takes 30 microseconds for each tensor and value
                decode(content, f"{session.storage.where}/{self.working}/{MANIFEST}")
                catalog.is_readable = True
            session.storage.check_lock()
            session.writer.request(
                Writer.commit,
                working=self.working,
                final=self.final,
                written={n: f.size_bytes for n, f in manifest.files.items() if n != METADATA},
                files=[(METADATA, len(metadata)), (MANIFEST, len(content))],
                blob=metadata + content,
                writer=session.credentials.writer,
                lease=session.credentials.lease,
            )
        except Exception as e:  # noqa: BLE001 - the other ranks wait for the result
            why = str(e) if isinstance(e, OutlastError) and str(e) else describe(e)
            try:
                # The writer may have been killed, or the disk have failed, between the rename and
                # the answer: then it is committed, durably.
                if manifest is not None and isinstance(e, CheckpointTimeout):
                    raise
                committed = manifest is not None and session.writer.request(
                    Writer.settle_commit, working=self.working, final=self.final, save_id=self.id
                )
            except (OutlastError, OSError, Dropped) as unknown:
                if self.aborted.is_set() and not self._is_visible():
                    return None, {"dropped": _DROPPED}  # its writer has ended, and renames nothing
                # Nothing is removed: what is visible now may be gone after a power failure, and
                # then the checkpoint that it replaced counts again.
                also = "" if unknown is e else f"; and then {describe(unknown)}"
                return None, {"unknown": f"rank 0: {why}{also}"}
            if manifest is None or not committed:
                self._remove_files()
                if self.aborted.is_set():
                    return None, {"dropped": _DROPPED}
                return None, {"error": f"rank 0 could not commit it: {why}"}
        return manifest, {"size_bytes": manifest.size_bytes, "differing": differing(records)}

    def _is_visible(self) -> bool:
        """Whether a restore may load the save, after its writer has ended."""
        try:
            return saved_by(self.session.storage, self.final) == self.id
        except (CheckpointError, OSError):
            return True

    def _remove_files(self) -> None:
        """Removes the files of a save that failed. If that fails too, the next job does it."""
        with contextlib.suppress(ProcessFailed, Dropped):
            self.session.writer.request(Writer.remove_folders, folders=[self.working])

    @property
    def _timeout_s(self) -> float:
        return self.session.writer.timeout_s


def _why_unusable(left: Sequence[SnapshotBuffer], present: Structure) -> str:
    """Why none of these buffers, which have the snapshot of a save, can be taken for it."""
    if not left:
        return "is gone"
    if any(buffer.busy for buffer in left):
        return "is in use"
    was, snapshot = left[0].structure, left[0].snapshot
    index = snapshot.get("index", "") if snapshot is not None else ""
    index = index or ("" if was is None else was.index)
    return f"is not of what the ranks save now: {present.difference(index) or 'its memory is lost'}"
