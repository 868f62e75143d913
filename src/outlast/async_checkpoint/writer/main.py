"""The writer process: writes snapshots to storage, checksums them, and keeps the last ones.

It is a separate program, without torch and with low priority; `writer/client.py` starts it and
talks to it (`writer/messages.py`). It maps the snapshot buffers of the main process, so snapshots
outlive that process. When the main process ends without a goodbye, the writer waits for a while at
a socket in a private folder, hands the buffers to the replacement that connects, and ends. It ends
at once when the process that would start a replacement (the launcher: the parent of the main
process) is gone too, so it is never left behind.

Three threads: the main one receives messages, and handles notifications at once. Requests are
carried out and answered in order by one thread (`outlast-writer`). Checkpoints that were made
invisible are removed by another thread, during the saves that follow.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outlast.async_checkpoint.storage.fence import Credentials, check
from outlast.async_checkpoint.storage.manifest import MANIFEST, saved_by
from outlast.async_checkpoint.storage.open import open_storage
from outlast.async_checkpoint.storage.protocol import Storage, is_temporary
from outlast.async_checkpoint.storage.unusable_folder import room_advice
from outlast.async_checkpoint.writer import messages
from outlast.async_checkpoint.writer.handover import Announcement, KeptMemory, hand_over
from outlast.async_checkpoint.writer.held_buffers import HeldBuffers
from outlast.async_checkpoint.writer.messages import Message, Request
from outlast.async_checkpoint.writer.write_files import Dropped, write_files
from outlast.errors import CheckpointError
from outlast.system.background_process import settle
from outlast.system.channel import Channel, unpack
from outlast.system.error_text import describe, traceback_text
from outlast.system.processes import open_process
from outlast.system.shared_memory import SharedMemory
from outlast.system.waiting import readable

_LAST_REQUEST_S = 10.0  # a disk that hangs must not keep this process forever
_RECYCLING = (messages.Commit, messages.SettleCommit, messages.HideFolders)


class Writer:
    """The writer process: its buffers and its threads."""

    def __init__(
        self,
        channel: Channel,
        config: dict[str, Any],
        wrap: Callable[[Storage], Storage] = lambda storage: storage,
    ) -> None:
        self.channel = channel
        parent = os.getppid()
        self.main_process = open_process(parent) if parent == config["main"] else None
        self._lingers = config["linger_s"] > 0
        self.threads = config["threads"]
        self.storage = wrap(open_storage(config["url"]))
        self.buffers = HeldBuffers()
        self.announcement = Announcement(config["main"])
        self.kept: KeptMemory | None = None
        self.dropped = threading.Event()
        self._requests: dict[type[Message], Callable[[Any], Message]] = {
            messages.BeginSave: self._begin_save,
            messages.WriteSnapshot: self._write_snapshot,
            messages.Commit: self._commit,
            messages.SettleCommit: self._settle_commit,
            messages.RemoveFolders: self._remove_folders,
            messages.HideFolders: self._hide_folders,
            messages.AwaitRemovals: self._await_removals,
            messages.DescribeSnapshots: self._describe_snapshots,
        }
        self._queue: queue.SimpleQueue[tuple[Message, int] | None] = queue.SimpleQueue()
        self._answering = threading.Thread(
            target=self._answer_all, name="outlast-writer", daemon=True
        )
        self._answering.start()
        self._removals: queue.Queue[str] = queue.Queue()
        self._removal_errors: list[str] = []  # since they were last reported
        self._recycles = False  # whether there may be recycled files of this process
        self._uncommitted: set[str] = set()  # the folders of saves begun
        self._is_last = False  # no other process will commit them
        threading.Thread(target=self._remove_all, name="outlast-remover", daemon=True).start()

    def serve(self) -> bool:
        """Serves the main process until it is gone; returns whether it said goodbye."""
        while True:
            try:
                self._await_message()
                payload, descriptors = self.channel.receive()
            except EOFError:
                # What is being written now cannot be committed: only the main process could.
                self.buffers.wake_all(self.dropped)
                return False
            message, number = messages.decode(payload)
            if isinstance(message, messages.Goodbye):
                self._recycles = self._recycles or message.tidy
                self._is_last = message.last
                return True
            if isinstance(message, Request):
                self._recycles = self._recycles or isinstance(message, _RECYCLING)
                self._queue.put((message, number))
            else:
                self._note(message, descriptors)

    def _await_message(self) -> None:
        """Waits for a message, or for the end of the main process, a fork of which may hold the
        channel open. Messages sent before that end are still read.
        """
        main_process = () if self.main_process is None else (self.main_process,)
        if self.channel.fileno() not in readable(self.channel.fileno(), *main_process):
            raise EOFError("the main process is gone")

    # ---------------------------------------------------------------------- notifications

    def _note(self, message: Message, descriptors: Sequence[int]) -> None:
        match message:
            case messages.ShareBuffer():
                buffer = self.buffers[message.buffer]
                buffer.close()
                buffer.memory = SharedMemory(message.size_bytes, descriptors[0])
                buffer.index = message.blob
            case messages.KeepMemory():
                if self.kept is not None:
                    self.kept.memory.close()
                memory = SharedMemory(message.size_bytes, descriptors[0])
                self.kept = KeptMemory(memory, Path(message.socket))
                if self._lingers:
                    self.announcement.place(self.kept.socket)
            case messages.BufferReused():
                # The main process says so before it writes the first byte: so a snapshot that is
                # being overwritten is never handed over, even if the main process dies right after.
                self.buffers[message.buffer].invalidate()
            case messages.ReleaseBuffer():
                self.buffers.release(message.buffer)
            case messages.SnapshotCopied():
                self.buffers[message.buffer].progress_of(message.save_id).reached(message.upto)
            case messages.SnapshotTorn():
                self.buffers[message.buffer].progress_of(message.save_id).tear()
            case messages.SnapshotSealed():
                buffer = self.buffers[message.buffer]
                buffer.values = message.blob
                buffer.snapshot = message.snapshot
                buffer.take_checksums()
                buffer.progress_of(message.snapshot["save_id"]).reached(sys.maxsize)
                if self._lingers:
                    self.announcement.place(Path(message.snapshot["socket"]))
            case messages.SnapshotCommitted():
                snapshot = self.buffers[message.buffer].snapshot
                if snapshot is not None and snapshot["save_id"] == message.save_id:
                    snapshot["committed"] = True
            case messages.DropSaves():
                self.buffers.wake_all(self.dropped)
            case _:
                raise TypeError(f"{message} is no notification")

    # --------------------------------------------------------------------------- requests

    def _answer_all(self) -> None:
        while (received := self._queue.get()) is not None:
            request, number = received
            try:
                answer = self._requests[type(request)](request)
            except Dropped:
                answer = messages.SaveDropped()
            except Exception as e:  # noqa: BLE001 - the main process raises it
                answer = messages.RequestFailed(
                    error=f"{describe(e)}{room_advice(e, self.storage.where)}",
                    traceback=traceback_text(e),
                    external=isinstance(e, OSError | CheckpointError),
                )
            # If the main process is gone, `serve` notices it too.
            with contextlib.suppress(OSError):
                self.channel.send(messages.encode(answer, number))

    def _begin_save(self, _: messages.BeginSave) -> messages.Done:
        self.dropped.clear()
        return messages.Done()

    def _write_snapshot(self, request: messages.WriteSnapshot) -> messages.FilesWritten:
        buffer = self.buffers[request.buffer]
        progress = buffer.progress_of(request.save_id)
        assert buffer.memory is not None
        self._uncommitted.add(request.folder)
        files = write_files(
            self.storage,
            request.folder,
            buffer.memory.view,
            request.files,
            {request.values_file: request.blob} if request.blob else {},
            threads=self.threads,
            dropped=self.dropped,
            filled=lambda upto: progress.wait_for(upto, self.dropped),
            hashes=not request.hashed,
            make_room=self._make_room,
        )
        if request.hashed:  # the sealed snapshot comes with its checksums
            return messages.FilesWritten(files={})
        buffer.written = request.save_id, files
        buffer.take_checksums()
        return messages.FilesWritten(files=files)

    def _commit(self, request: messages.Commit) -> messages.Done:
        at = 0
        for number, (name, size_bytes) in enumerate(request.files, 1):
            if number == len(request.files) and request.working == request.final:
                # In place, the manifest makes the checkpoint visible: all else is durable first.
                self.storage.sync(request.working)
                self._check_fence(request)
            self.storage.put(request.working, name, request.blob[at : at + size_bytes])
            at += size_bytes
        self._check_fence(request)
        self.storage.sync(request.working)
        replaced = self.storage.publish(request.working, request.final)
        self._uncommitted.discard(request.working)
        if replaced:
            self._removals.put(replaced)
        return messages.Done()

    def _settle_commit(self, request: messages.SettleCommit) -> messages.Settled:
        self.storage.settle()
        try:
            self.storage.size(request.final, MANIFEST)
        except FileNotFoundError:
            return messages.Settled(committed=False)
        found = saved_by(self.storage, request.final)
        if not found:
            where = f"{self.storage.where}/{request.final}/{MANIFEST}"
            raise CheckpointError(f"{where} does not say which save it is of")
        if found != request.save_id:
            return messages.Settled(committed=False)
        self._uncommitted.discard(request.working)
        if request.working != request.final:
            self._removals.put(request.working)  # if it exists, it holds the replaced checkpoint
        return messages.Settled(committed=True)

    def _check_fence(self, request: messages.Commit | messages.HideFolders) -> None:
        """Refuses a change of what is visible, if the job has gone on without this host. A process
        that is stopped after the check commits a checkpoint that does not count: see `fence.py`.
        """
        check(self.storage, Credentials(request.writer, request.lease))

    def _remove_folders(self, request: messages.RemoveFolders) -> messages.Done:
        for folder in request.folders:
            self.storage.remove(folder)
            self._uncommitted.discard(folder)
        return messages.Done()

    def _hide_folders(self, request: messages.HideFolders) -> messages.RemovalErrors:
        self._check_fence(request)
        for folder in request.folders:
            if hidden := self.storage.hide(folder):
                self._removals.put(hidden)
        return self._report_removal_errors()

    def _await_removals(self, request: messages.AwaitRemovals) -> messages.RemovalErrors:
        if request.tidy:
            self._make_room()
        else:
            self._removals.join()
        return self._report_removal_errors()

    def _describe_snapshots(self, _: messages.DescribeSnapshots) -> messages.Snapshots:
        return messages.Snapshots(snapshots=self.buffers.described())

    # --------------------------------------------------------------------------- removals

    def tidy_up(self) -> None:
        """At the end: completes the removals, deletes the recycled files, and removes what dropped
        saves have left. No one is left to report an error to: the next job removes the rest.

        A save that the main process has dropped may still hide checkpoints, whose files would be
        recycled after the deletion, or commit: so the last request ends first.
        """
        unfinished = self._is_last and self._uncommitted
        if not self._recycles and not unfinished:
            return
        self.buffers.wake_all(self.dropped)  # a write ends at once
        self._queue.put(None)
        self._answering.join(_LAST_REQUEST_S)
        if self._answering.is_alive():
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

    def _report_removal_errors(self) -> messages.RemovalErrors:
        errors, self._removal_errors = self._removal_errors, []
        return messages.RemovalErrors(errors=errors)


def main(wrap: Callable[[Storage], Storage] = lambda storage: storage) -> None:
    """Runs the writer process, which uses what `wrap` makes of its storage."""
    # Lower than training, but not so low that a save takes very long on a busy machine: training
    # would have to wait for it in the end.
    channel = settle(nice=5, ends_with_parent=False)
    config = unpack(sys.argv[1].encode())[0]
    launcher = open_process(config["launcher"])
    writer = Writer(channel, config, wrap)
    try:
        if not writer.serve() and writer.main_process is not None and config["linger_s"] > 0:
            # The channel may end before the process does.
            readable(writer.main_process, timeout=config["linger_s"])
            snapshots = writer.buffers.handover()
            hand_over(snapshots, config["linger_s"], launcher, writer.announcement, writer.kept)
        writer.announcement.withdraw()
        writer.tidy_up()
    finally:
        os._exit(0)  # threads in the middle of a write must not hold up the end


if __name__ == "__main__":
    main()
