"""What a process keeps for one folder of checkpoints: the writer, the memories, the lock.

Made with the first checkpointer for a folder, and taken over by the next one for the same folder in
this process: a training function that is restarted in place makes its checkpointer anew, and finds
the buffers allocated, the writer running and the last snapshots still in memory.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from outlast.async_checkpoint.environment import events_folder, runtime_folder
from outlast.async_checkpoint.save.structure_exchange import Agreed
from outlast.async_checkpoint.snapshot.copy_now import EagerCopy
from outlast.async_checkpoint.snapshot.copy_overlapped import OverlappedCopy
from outlast.async_checkpoint.snapshot.shared_memory import SharedMemory, populate
from outlast.async_checkpoint.snapshot.structure import Structure
from outlast.async_checkpoint.state_dict.memo import Described
from outlast.async_checkpoint.storage.manifest import checksum
from outlast.async_checkpoint.storage.open import open_storage
from outlast.async_checkpoint.writer.client import WriterClient
from outlast.async_checkpoint.writer.handover import take_over
from outlast.async_checkpoint.writer.messages import BufferReused, ReleaseBuffer, SnapshotSealed
from outlast.events import JsonlSink, Sink

__all__ = ["FolderSession", "SnapshotBuffer", "session_for"]

_sessions: dict[str, FolderSession] = {}
_lock = threading.Lock()


@dataclasses.dataclass
class SnapshotBuffer:
    """Room for one snapshot.

    Attributes:
        number: names it in the writer.
        memory: the memory; none before the first use.
        structure: what its frames were made for.
        targets: tensors that look into it.
        busy: whether a save is using it.
        snapshot: what lies in it, once it is sealed.
        values: and what belongs to it that is no tensor.
        copy: copies into it.
        turn: counts its users; one of the past cannot give it back.
    """

    number: int
    memory: SharedMemory | None = None
    structure: Structure | None = None
    targets: Sequence[torch.Tensor] = ()
    busy: bool = False
    snapshot: dict[str, Any] | None = None
    values: bytes = b""
    copy: OverlappedCopy | EagerCopy | None = None
    turn: int = 0


class FolderSession:
    """See the module. Not for use by two checkpointers at a time.

    Args:
        url: of the folder.
        threads: that the writer writes with.
        linger_s: how long the snapshots outlive this process, in seconds.
    """

    def __init__(self, url: str, *, threads: int, linger_s: float) -> None:
        self.url = url
        self.storage = open_storage(url)
        self.locked = False
        self.identity = ""
        self.owner: Any = None  # the checkpointer that uses it
        self.writer = WriterClient(
            {"url": url, "threads": threads, "linger_s": linger_s, "launcher": os.getppid()}
        )
        self.described = Described()
        self.agreed = Agreed()
        self.buffers: list[SnapshotBuffer] = []
        self.handed_over: list[SnapshotBuffer] = []
        self._sink: Sink | None = None
        self._freed = threading.Condition()
        self._allocating: threading.Thread | None = None
        # A program that ends says goodbye to the writer, which would linger otherwise.
        atexit.register(self.close, 1.0)

    def sink(self, rank: int) -> Sink | None:
        """Where events go that have no other place: one file a process, however many checkpointers
        follow each other in it.

        Args:
            rank: of the first of them; it is in the name of the file.
        """
        folder = events_folder()
        if self._sink is None and folder:
            self._sink = JsonlSink(Path(folder) / f"checkpoint{rank}-{os.getpid()}.jsonl")
        return self._sink

    def socket_path(self, rank: int, world_size: int) -> Path:
        """Where a dead main process's writer waits for the next one of this rank."""
        name = checksum(f"{self.url}\0{rank}\0{world_size}".encode())
        return runtime_folder() / f"{name}.sock"

    def take_handover(self, rank: int, world_size: int) -> None:
        """Takes what a dead process of this rank left in memory."""
        found = take_over(self.socket_path(rank, world_size))
        if found:
            self.writer.start()
        for snapshot in found:
            number = 1000 + len(self.handed_over)
            memory = SharedMemory(os.fstat(snapshot.descriptor).st_size, snapshot.descriptor)
            buffer = SnapshotBuffer(
                number, memory, snapshot=snapshot.snapshot, values=snapshot.values
            )
            self.handed_over.append(buffer)
            self.writer.share(number, memory, snapshot.snapshot["index"].encode())
            self.writer.tell(
                SnapshotSealed(buffer=number, snapshot=snapshot.snapshot, blob=snapshot.values)
            )

    def unlock(self) -> None:
        """Lets another process have the folder's lock, if this one holds it."""
        if self.locked:
            self.storage.unlock()
            self.locked = False

    def resize(self, count: int) -> None:
        """Has `count` buffers."""
        while len(self.buffers) < count:
            self.buffers.append(SnapshotBuffer(len(self.buffers)))

    def take(self, structure: Structure) -> SnapshotBuffer:
        """A buffer for a snapshot of this structure; waits for one to be free."""
        with self._freed:
            self._freed.wait_for(lambda: any(not buffer.busy for buffer in self.buffers))
            free = [buffer for buffer in self.buffers if not buffer.busy]
            # One that fits, if there is one; and then the one whose snapshot is older.
            buffer = min(free, key=lambda s: (s.structure is not structure, _age(s)))
            buffer.busy = True
            buffer.turn += 1
        try:
            self._fit(buffer, structure)
        except BaseException:
            self.give_back(buffer)
            raise
        return buffer

    def prepare(self, structure: Structure) -> None:
        """Allocates the memory for snapshots of this structure beside what comes next: the first
        save then costs as little as the others. What lies in memory already stays there.
        """
        with self._freed:
            fresh = [buffer for buffer in self.buffers if buffer.memory is None and not buffer.busy]
            for buffer in fresh:
                buffer.busy = True
        if not fresh:
            return

        def allocate() -> None:
            for buffer in fresh:
                try:
                    self._fit(buffer, structure)
                finally:
                    self.give_back(buffer)

        self.writer.start()
        self._allocating = threading.Thread(target=allocate, name="outlast-allocate", daemon=True)
        self._allocating.start()

    def _await_allocation(self) -> None:
        if self._allocating is not None:
            self._allocating.join()

    def give_back(self, buffer: SnapshotBuffer, turn: int | None = None) -> None:
        """The save does not need it any more; nothing, if `turn` is not the present one."""
        with self._freed:
            if turn is not None and turn != buffer.turn:
                return
            if buffer.copy is not None:
                buffer.copy.call_off()  # nothing more is copied into what others may take
                buffer.copy = None
            buffer.busy = False
            self._freed.notify_all()

    def give_back_all(self) -> None:
        """No save is under way any more."""
        self._await_allocation()
        with self._freed:
            for buffer in self.buffers:
                if buffer.copy is not None:
                    buffer.copy.call_off()
                    buffer.copy = None
                buffer.busy = False
                buffer.turn += 1
            self._freed.notify_all()

    def release_handed_over(self) -> None:
        """The snapshots of a dead predecessor are of no use any more: there is a newer state."""
        for buffer in self.handed_over:
            self.writer.tell(ReleaseBuffer(buffer=buffer.number))
            self.writer.forget(buffer.number)
            if buffer.memory is not None:
                buffer.memory.close()
        self.handed_over = []

    def _fit(self, buffer: SnapshotBuffer, structure: Structure) -> None:
        # Before the first byte is overwritten: see `writer_main`.
        buffer.snapshot = None
        self.writer.tell(BufferReused(buffer=buffer.number))
        if buffer.structure is structure:
            return
        buffer.targets = ()
        buffer.structure = None
        needed = structure.layout.size_bytes
        if buffer.memory is None or not needed <= buffer.memory.size_bytes <= 2 * needed + (
            1 << 20
        ):
            old, buffer.memory = buffer.memory, None
            if old is not None:
                self.writer.forget(buffer.number)
                old.close()
            buffer.memory = SharedMemory(needed)
            populate(buffer.memory)
            self._pin(buffer.memory)
        self.writer.share(buffer.number, buffer.memory, structure.index)
        structure.layout.inscribe(buffer.memory, structure.tensors)
        buffer.targets = structure.targets(buffer.memory)
        buffer.structure = structure

    def _pin(self, memory: SharedMemory) -> None:
        """Lets a GPU copy into it by itself, beside the program."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            # Without it copies are slower, but right; so an error is no reason to stop.
            torch.cuda.cudart().cudaHostRegister(memory.address, memory.size_bytes, 0)

    def close(self, timeout_s: float) -> None:
        """Ends the writer and gives all memory back."""
        atexit.unregister(self.close)
        self._await_allocation()
        for buffer in self.buffers:
            if buffer.copy is not None:
                buffer.copy.call_off()  # its memory goes
        self.writer.close(timeout_s)
        for buffer in (*self.buffers, *self.handed_over):
            buffer.targets = ()
            if buffer.memory is not None:
                buffer.memory.close()
        self.buffers, self.handed_over = [], []
        self.storage.close()
        self.locked = False
        if self._sink is not None:
            self._sink.close()
            self._sink = None
        with _lock:
            if _sessions.get(self.url) is self:
                del _sessions[self.url]


def session_for(url: str, *, threads: int, linger_s: float) -> tuple[FolderSession, bool]:
    """The session for a folder, and whether it was there before."""
    with _lock:
        if url in _sessions:
            return _sessions[url], True
        session = FolderSession(url, threads=threads, linger_s=linger_s)
        _sessions[url] = session
        return session, False


def _age(buffer: SnapshotBuffer) -> int:
    return -1 if buffer.snapshot is None else int(buffer.snapshot["number"])
