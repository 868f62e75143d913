"""The writer process: writes snapshots to storage, checksums them, and keeps the last ones.

It is a separate program, without torch and with low priority. It maps the snapshot buffers of the
main process, so snapshots outlive that process (`remote.py`). Checkpoints that were made invisible
are removed by a thread of their own, during the saves that follow.
"""

from __future__ import annotations

import contextlib
import queue
import sys
from collections.abc import Callable
from typing import Any

from outlast.async_checkpoint.storage.directory import leftovers, open_storage
from outlast.async_checkpoint.storage.fence import Credentials, check
from outlast.async_checkpoint.storage.manifest import MANIFEST, check_written, saved_by
from outlast.async_checkpoint.storage.protocol import Storage, is_temporary
from outlast.async_checkpoint.storage.system_errors import room_advice
from outlast.async_checkpoint.writer.handover import SnapshotDescription, StoredSnapshot
from outlast.async_checkpoint.writer.held_buffers import HeldBuffers
from outlast.async_checkpoint.writer.remote import Call, Service, run
from outlast.async_checkpoint.writer.write_files import write_files
from outlast.errors import CheckpointError
from outlast.system.channel import Channel
from outlast.system.error_text import describe
from outlast.system.parallel import start_thread
from outlast.system.shared_memory import SharedMemory

_NICE = 5  # lower than training, which would have to wait in the end for a save that takes too long
_LAST_REQUEST_S = 10.0  # a disk that hangs must not keep this process forever
_RECYCLING = ("commit", "settle_commit", "hide_folders")


class Writer(Service):
    """The writer process. The public methods are called by the main process."""

    def __init__(
        self,
        channel: Channel,
        config: dict[str, Any],
        wrap: Callable[[Storage], Storage] = lambda storage: storage,
    ) -> None:
        self.threads = config["threads"]
        self.storage = wrap(open_storage(config["url"]))
        self.buffers = HeldBuffers()
        self._removals: queue.Queue[str] = queue.Queue()
        self._removal_errors: list[str] = []  # since they were last reported
        self._recycles = False  # whether there may be recycled files of this process
        self._uncommitted: set[str] = set()  # the folders of saves begun
        self._is_last = False  # no other process will commit them
        start_thread("outlast-remover", self._remove_all)
        super().__init__(channel, config)

    def serve(self) -> bool:
        goodbye = super().serve()
        if not goodbye:  # what is being written now cannot be committed: only that process could
            self.buffers.drop()
        return goodbye

    def accept(self, request: Call) -> None:
        self._recycles = self._recycles or request.method in _RECYCLING
        super().accept(request)

    def explain(self, error: Exception) -> str:
        return f"{describe(error)}{room_advice(error, self.storage.where)}"

    def snapshots(self) -> list[StoredSnapshot]:
        return self.buffers.stored()

    # ------------------------------------------------------------------ calls without an answer

    def leave(self, tidy: bool, last: bool, replaced: bool, writer: str, lease: str) -> None:
        """The main process ends normally: see `goodbye`. Completes removals in the background
        first, deletes the recycled files if `tidy`, and removes what was written of saves that were
        not committed if `last`: the main process is rank 0, so no other process will commit them.
        `replaced`: also those of a writer that was lost, if a `commit` would be allowed.
        """
        self._recycles = self._recycles or tidy
        self._is_last = last
        if last and replaced:
            with contextlib.suppress(OSError, CheckpointError):  # the next job removes them
                found = leftovers(self.storage)
                # Afterwards: so they were found before another group of hosts could save here.
                self._check_fence(writer, lease)
                self._uncommitted.update(found)
        self.goodbye()

    def share_buffer(self, buffer: int, memory: SharedMemory, index: str) -> None:
        """Shares a buffer, instead of the one with that number. `index`: see `Structure.index`."""
        self.buffers.share(buffer, memory, index)

    def release_buffer(self, buffer: int) -> None:
        self.buffers.release(buffer)

    def keep_memory(self, memory: SharedMemory, socket: str, name: str) -> None:
        """Keeps this, instead of what has this name, for a replacement of the main process, at
        `socket`.
        """
        if before := self.kept.pop(name, None):
            before.close()
        self.kept[name] = memory
        self.announce(socket)

    def reuse_buffer(self, buffer: int) -> None:
        """The main process is about to write into the buffer: its snapshot is no longer valid. As
        this arrives before the first byte is written, a snapshot that is being overwritten is never
        handed over, even if the main process dies right after.
        """
        self.buffers.invalidate(buffer)

    def copied(self, buffer: int, save_id: str, upto: int) -> None:
        """The snapshot is copied up to this offset of the buffer."""
        self.buffers.reached(buffer, save_id, upto)

    def torn(self, buffer: int, save_id: str) -> None:
        self.buffers.tear(buffer, save_id)

    def sealed(self, buffer: int, snapshot: SnapshotDescription, blob: bytes = b"") -> None:
        """The snapshot is complete; `blob` holds its pickled values."""
        held = self.buffers[buffer]
        held.values = blob
        held.snapshot = snapshot
        self.buffers.reached(buffer, snapshot["save_id"], sys.maxsize)
        self.announce(snapshot["socket"])

    def committed(self, buffer: int, save_id: str, final: str) -> None:
        snapshot = self.buffers[buffer].snapshot
        if snapshot is not None and snapshot["save_id"] == save_id:
            snapshot["committed"], snapshot["final"] = True, final

    def drop_saves(self) -> None:
        """Everything that is being written is dropped, until the next `begin_save`."""
        self.buffers.drop()

    # --------------------------------------------------------------------------------- requests

    def begin_save(self) -> None:
        """A new save begins: an earlier `drop_saves` does not apply to it."""
        self.buffers.dropped.clear()

    def write_snapshot(
        self,
        buffer: int,
        save_id: str,
        folder: str,
        files: list[tuple[str, int, int]],
        values_file: str,
        hashed: bool,
        blob: bytes = b"",
    ) -> dict[str, dict[str, Any]]:
        """Writes the files (name, first byte in the buffer, size) of a snapshot into a folder,
        durably, and its pickled values in `blob` as `values_file`. Returns `size_bytes` and
        `checksums` of each, unless the main process takes the checksums (`hashed`).
        """
        held = self.buffers[buffer]
        assert held.memory is not None
        self._uncommitted.add(folder)
        written = write_files(
            self.storage,
            folder,
            held.memory.view,
            files,
            {values_file: blob} if blob else {},
            threads=self.threads,
            dropped=self.buffers.dropped,
            filled=self.buffers.filled(buffer, save_id),
            hashes=not hashed,
            make_room=self._make_room,
        )
        if hashed:  # the sealed snapshot comes with its checksums
            return {}
        held.written = save_id, written
        return written

    def commit(
        self,
        working: str,
        final: str,
        written: dict[str, int],
        files: list[tuple[str, int]],
        writer: str,
        lease: str,
        blob: bytes,
    ) -> None:
        """Makes a checkpoint visible, if all files that the ranks have `written` are there, and no
        others. `files` (name, size), whose contents are in `blob`, are written first, in order: the
        last is the manifest. In a job on many hosts it is refused unless the newest fence is that
        of `writer` and the host holds its lease (`lease` is the path of the page).
        """
        check_written(self.storage, working, written)
        at = 0
        for number, (name, size_bytes) in enumerate(files, 1):
            if number == len(files) and working == final:
                # In place, the manifest makes the checkpoint visible: all else is durable first.
                self.storage.sync(working)
                self._check_fence(writer, lease)
            self.storage.put(working, name, blob[at : at + size_bytes])
            at += size_bytes
        self._check_fence(writer, lease)
        self.storage.sync(working)
        replaced = self.storage.publish(working, final)
        self._uncommitted.discard(working)
        if replaced:
            self._removals.put(replaced)

    def settle_commit(self, working: str, final: str, save_id: str) -> bool:
        """After a `commit` that failed or was lost: whether the save is committed, durably."""
        self.storage.settle()
        try:
            self.storage.size(final, MANIFEST)
        except FileNotFoundError:
            return False
        found = saved_by(self.storage, final)
        if not found:
            where = f"{self.storage.where}/{final}/{MANIFEST}"
            raise CheckpointError(f"{where} does not say which save it is of")
        if found != save_id:
            return False
        self._uncommitted.discard(working)
        if working != final:
            self._removals.put(working)  # if it exists, it holds the replaced checkpoint
        return True

    def remove_folders(self, folders: list[str]) -> None:
        for folder in folders:
            self.storage.remove(folder)
            self._uncommitted.discard(folder)

    def hide_folders(self, folders: list[str], writer: str, lease: str) -> list[str]:
        """Makes checkpoints invisible, durably; their files are removed in the background. Refused
        like a `commit`. Returns the errors of removals since they were last reported.
        """
        self._check_fence(writer, lease)
        for folder in folders:
            if hidden := self.storage.hide(folder):
                self._removals.put(hidden)
        return self._report_removal_errors()

    def await_removals(self, tidy: bool) -> list[str]:
        """Waits for the removals, also of recycled files if `tidy`; returns as `hide_folders`."""
        if tidy:
            self._make_room()
        else:
            self._removals.join()
        return self._report_removal_errors()

    def describe_snapshots(self) -> list[SnapshotDescription]:
        """The snapshots in memory that are complete, with their checksums."""
        return [stored.description for stored in self.buffers.stored()]

    def _check_fence(self, writer: str, lease: str) -> None:
        """Refuses a change of what is visible, if the job has gone on without this host. A process
        that is stopped after the check commits a checkpoint that does not count: see `fence.py`.
        """
        check(self.storage, Credentials(writer, lease))

    # --------------------------------------------------------------------------------- removals

    def tidy_up(self) -> None:
        """At the end: completes the removals, deletes the recycled files, and removes what dropped
        saves have left. No one is left to report an error to: the next job removes the rest.

        A save that the main process has dropped may still hide checkpoints, whose files would be
        recycled after the deletion, or commit: so the last request ends first.
        """
        unfinished = self._is_last and self._uncommitted
        if not self._recycles and not unfinished:
            return
        self.buffers.drop()  # a write ends at once
        self.requests.put(None)
        self.answering.join(_LAST_REQUEST_S)
        if self.answering.is_alive():
            return
        with contextlib.suppress(OSError, CheckpointError):
            if self._recycles:
                self._make_room()
            for folder in self._uncommitted if self._is_last else ():
                if is_temporary(folder):  # elsewhere it is invisible, and may be used again
                    self.storage.remove(folder)

    def _make_room(self) -> None:
        self._removals.join()
        self.storage.tidy()

    def _remove_all(self) -> None:
        """Removes checkpoints that are invisible already. That may take a third of the time of a
        save, on a file system that discards freed blocks; the next save does not wait for it.
        """
        while True:
            folder = self._removals.get()
            try:
                self.storage.recycle(folder)
            except Exception as e:  # noqa: BLE001 - reported with the next answer
                self._removal_errors.append(f"{folder}: {e}")
            finally:
                self._removals.task_done()

    def _report_removal_errors(self) -> list[str]:
        errors, self._removal_errors = self._removal_errors, []
        return errors


def main(wrap: Callable[[Storage], Storage] = lambda storage: storage) -> None:
    """Runs the writer process, which uses what `wrap` makes of its storage."""
    run(lambda channel, config: Writer(channel, config, wrap), _NICE)


if __name__ == "__main__":
    main()
