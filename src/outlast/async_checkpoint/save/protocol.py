"""Carries out one save, from the writer process to the conclusion of all ranks.

    agree       if the structure is unchanged: all ranks are at the same save
    write       the writer process makes this rank's files durable, with their checksums; it
                writes what has been copied while the copy is still running
    seal        the snapshot is complete: the state at the moment of the save
    verdict     all ranks have written, or one has failed: the ledger tells every rank the same
    commit      rank 0: the manifest, then the rename
    conclude    rank 0 tells the other ranks the result

Nothing before the commit makes anything visible. A checkpoint is never both committed and dropped:
either needs the verdict of the save, which is claimed once. An abort claims a failure; if that
claim wins, no rank commits. If "all ranks have written" won, the abort came too late, and the
commit continues, on rank 0 and for all ranks.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from outlast.async_checkpoint.finite import not_finite_in
from outlast.async_checkpoint.observers import notify_committing
from outlast.async_checkpoint.save.folder_session import FolderSession
from outlast.async_checkpoint.save.save import ABORTED, Save, commit_of, error_of
from outlast.async_checkpoint.save.structure_exchange import StructureExchange
from outlast.async_checkpoint.storage.manifest import Manifest, saved_by
from outlast.async_checkpoint.writer.client import WriterFailed
from outlast.async_checkpoint.writer.messages import RemoveFolders, SettleCommit, WriteSnapshot
from outlast.async_checkpoint.writer.write_files import Dropped
from outlast.coordination import KeyTimeout
from outlast.coordination.call_ledger import CallLedger, Verdict
from outlast.errors import (
    CheckpointError,
    CheckpointTimeout,
    OutlastError,
    SaveCancelled,
    StoreError,
)
from outlast.system.error_text import describe
from outlast.system.tracebacks import drop_tracebacks

_DROPPED = "dropped for all ranks by rank 0, while it was being committed"


class SaveProtocol:
    """One rank's part in a save. Call i of `ledger` is save i.

    Attributes:
        timeout_s: how long it waits for the other ranks.
        aborted: whether all saves are being dropped; set by another thread, once.
    """

    def __init__(
        self,
        session: FolderSession,
        ledger: CallLedger,
        exchange: StructureExchange,
        timeout_s: float,
    ) -> None:
        self._session = session
        self._ledger = ledger
        self._exchange = exchange
        self.timeout_s = timeout_s
        self.aborted = False

    def carry_out(self, save: Save) -> tuple[int, Manifest | None]:
        """Saves and commits; returns the size of the checkpoint, and on rank 0 its manifest, if
        old checkpoints may be removed.
        """
        ledger, index = self._ledger, save.index
        late = False
        try:
            if not save.agreed:
                save.catalog = self._exchange.unchanged(index) or save.catalog
            ledger.announce(index, save.name)
            part = self._write(save)
        except StoreError:
            raise
        except Exception as e:  # noqa: BLE001 - every rank must know of any error
            late = isinstance(e, CheckpointTimeout)
            # After an abort, whatever this is, the abort caused it: it kills the writer.
            ledger.fail(index, save.failure(ABORTED) if self.aborted else save.failure_of(e))
            drop_tracebacks(e)  # it may stay in the snapshot: see `error_from`
        else:
            ledger.finish(index, part)
        verdict = self._await_verdict(save)
        if verdict.failure is not None:
            # Rank 0 does it for all; but a rank that was at another save has its own folder.
            # A disk that did not respond is not asked again: the next job removes what is there.
            if not late and (ledger.rank == 0 or verdict.failure.name != save.name):
                self._remove_files(save)
            ledger.forget(index)
            raise error_of(verdict.failure, late)
        manifest: Manifest | None = None
        if ledger.rank == 0:
            manifest, result = self._commit(save)
            try:
                ledger.conclude(index, json.dumps(result).encode())
            except StoreError:
                if manifest is None:
                    raise
                # The store is gone, and the job's iteration with it; the checkpoint is committed
                # anyway. The next checkpointer may be running: nothing old is removed.
                return manifest.size_bytes, None
        else:
            result = self._await_conclusion(save)
        with contextlib.suppress(StoreError):  # the store is gone, and its keys with it
            ledger.forget(index)
        if "dropped" in result:
            raise SaveCancelled(f"the {save.name} was {result['dropped']}")
        if "unknown" in result:
            text = f"it is not known whether the {save.name} was committed: {result['unknown']}"
            raise CheckpointError(text)
        if "error" in result:
            raise CheckpointError(f"the {save.name} was not committed: {result['error']}")
        return int(result["size_bytes"]), manifest

    def _write(self, save: Save) -> bytes:
        """Writes this rank's files; returns what rank 0 must know about them."""
        snapshot, writer = save.snapshot, self._session.writer
        description = snapshot.description
        request = WriteSnapshot(
            buffer=snapshot.buffer.number,
            save_id=snapshot.save_id,
            folder=description["working"],
            files=description["layout"],
            values_file=description["values"],
            hashed=snapshot.hashed,
            blob=snapshot.values,
        )
        try:
            with writer.exclusive:  # no `BeginSave` of another checkpointer in between
                writer.begin_save()
                if self.aborted:
                    raise Dropped
                answer = writer.request(request)
        finally:
            # Even after an error: once the snapshot is sealed, nothing is being copied, and no hook
            # is left. If it is torn, that is why its save was dropped.
            snapshot.sealed.wait()
            if snapshot.error is not None:
                raise snapshot.error
        files = description.get("files") if snapshot.hashed else answer.files
        part: dict[str, Any] = {
            "files": files,
            "places": description["places"],
            "id": snapshot.save_id,
        }
        if save.finite:
            part["non_finite"] = not_finite_in(snapshot.buffer, save.finite)
        return json.dumps(part, separators=(",", ":")).encode()

    def _await_verdict(self, save: Save) -> Verdict:
        try:
            return self._ledger.await_verdict(save.index, self.timeout_s)
        except KeyTimeout:
            cause = f"not all ranks had written their parts within {self.timeout_s:g} s"
            self._ledger.fail(save.index, save.failure(cause))
            return self._ledger.await_verdict(save.index, None)  # there is one now

    def _commit(self, save: Save) -> tuple[Manifest | None, dict[str, Any]]:
        """Commits the checkpoint, on rank 0. Returns the manifest, if it is committed, and the
        result for the other ranks: the `size_bytes` of the checkpoint, or why it is not committed
        (`error`, `dropped`), or may not be (`unknown`).
        """
        manifest: Manifest | None = None
        try:
            parts = self._ledger.parts(save.index)
            manifest, commit = commit_of(save, parts, self._session.credentials)
            self._session.writer.request(commit)
        except Exception as e:  # noqa: BLE001 - the other ranks wait for the result
            why = str(e) if isinstance(e, OutlastError) and str(e) else describe(e)
            try:
                if manifest is not None and self._is_committed(save, e):
                    return manifest, {"size_bytes": manifest.size_bytes}
            except (OutlastError, OSError, Dropped) as unknown:
                if self.aborted and not self._is_visible(save):
                    return None, {"dropped": _DROPPED}  # its writer has ended, and renames nothing
                # Nothing is removed: what is visible now may be gone after a power failure, and
                # then the checkpoint that it replaced counts again.
                also = "" if unknown is e else f"; and then {describe(unknown)}"
                return None, {"unknown": f"rank 0: {why}{also}"}
            self._remove_files(save)
            if self.aborted:
                return None, {"dropped": _DROPPED}
            return None, {"error": f"rank 0 could not commit it: {why}"}
        return manifest, {"size_bytes": manifest.size_bytes}

    def _is_committed(self, save: Save, error: Exception) -> bool:
        """Whether the save is committed although the commit has failed with `error`: the writer
        may have been killed between the rename and its answer, or the disk may have failed only
        then. It is durable if so.

        Raises:
            CheckpointError: if that cannot be known. A disk that does not respond is not asked.
        """
        if isinstance(error, CheckpointTimeout):
            raise error
        description = save.snapshot.description
        request = SettleCommit(
            working=description["working"],
            final=description["final"],
            save_id=save.snapshot.save_id,
        )
        return self._session.writer.request(request).committed

    def _is_visible(self, save: Save) -> bool:
        """Whether a restore may load the save, after its writer has ended."""
        try:
            found = saved_by(self._session.storage, save.snapshot.description["final"])
        except (CheckpointError, OSError):
            return True
        return found == save.snapshot.save_id

    def _await_conclusion(self, save: Save) -> dict[str, Any]:
        """The result that rank 0 sends: see `_commit`. `unknown`: why it has sent none."""
        notify_committing()
        try:
            return dict(json.loads(self._ledger.await_conclusion(save.index, self.timeout_s)))
        except KeyTimeout:
            return {"unknown": f"rank 0 did not report it within {self.timeout_s:g} s"}

    def _remove_files(self, save: Save) -> None:
        """Removes the files of a save that failed. If that fails too, the next job does it."""
        with contextlib.suppress(WriterFailed, Dropped):
            working = save.snapshot.description["working"]
            self._session.writer.request(RemoveFolders(folders=[working]))
