"""The snapshot buffers of a process: allocated once, one save at a time, shared with the writer."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from outlast.async_checkpoint.snapshot.structure import Structure
from outlast.async_checkpoint.writer.client import WriterClient
from outlast.async_checkpoint.writer.handover import SnapshotDescription, StoredSnapshot, take_over
from outlast.async_checkpoint.writer.main import Writer
from outlast.coordination.waits import waits
from outlast.system import devices
from outlast.system.main_program import without_collections
from outlast.system.parallel import start_thread
from outlast.system.shared_memory import SharedMemory, populate


class NoFreeBuffer(Exception):
    """Saves in progress use all buffers."""


@dataclasses.dataclass
class SnapshotBuffer:
    """Memory for one snapshot.

    Attributes:
        number: names it in the writer.
        unlock: ends its page lock, if the process uses an accelerator that has page-locked it.
        targets: gives the view into it for each tensor of the structure that it is laid out for.
        snapshot, values: the sealed snapshot in it, if there is one, and its pickled values.
        stop: ends the last copy into it, which may still be running.
        turn: counts its users: a past user cannot give it back.
        reserved: for what no save may use it: its snapshot is being copied to another host.
    """

    number: int
    memory: SharedMemory | None = None
    unlock: Callable[[], None] | None = None
    structure: Structure | None = None
    targets: Callable[[int], torch.Tensor] | None = None
    busy: bool = False
    snapshot: SnapshotDescription | None = None
    values: bytes = b""
    stop: Callable[[], None] | None = None
    turn: int = 0
    reserved: object = None

    @property
    def usable(self) -> bool:
        return not self.busy and self.reserved is None

    def end_copy(self) -> None:
        """Ends the copy into it: when this returns, nothing is being written into it."""
        if self.stop is not None:
            self.stop()
            self.stop = None  # it holds the snapshot

    def drop_memory(self) -> None:
        self.targets = self.structure = None
        unlock, self.unlock = self.unlock, None
        if unlock is not None:
            unlock()
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.close()


class BufferPool:
    """The buffers for saves, and those that were `handed_over` by a dead process of this rank,
    until there is a newer snapshot. The snapshot of the save `overwritten_last` is that.
    """

    def __init__(self, writer: WriterClient) -> None:
        self.buffers: list[SnapshotBuffer] = []
        self.handed_over: list[SnapshotBuffer] = []
        self.overwritten_last = ""
        self._writer = writer
        self._freed = threading.Condition()
        self._allocating: threading.Thread | None = None
        self._end_allocation = threading.Event()
        self._spare = 0

    def grow(self, count: int, spare: int = 0) -> None:
        """Grows to at least `count` buffers for saves, and `spare` more that may be reserved."""
        self._spare = spare
        while len(self.buffers) < count + spare:
            self.buffers.append(SnapshotBuffer(len(self.buffers)))

    @property
    def all_buffers(self) -> list[SnapshotBuffer]:
        return [*self.buffers, *self.handed_over]

    def take_left(self, save_id: str, structure: Structure) -> SnapshotBuffer | None:
        """The buffer with the sealed snapshot of a save that was cut off, if that is of this
        structure; it is in use from now on.
        """
        with self._freed:
            for buffer in self.all_buffers:
                snapshot = buffer.snapshot
                if snapshot is None or snapshot["save_id"] != save_id or buffer.busy:
                    continue
                if snapshot.get("structure") != structure.digest or buffer.memory is None:
                    return None
                buffer.busy = True
                buffer.turn += 1
                if buffer.structure is not structure:
                    buffer.structure, buffer.targets = structure, structure.inscribe(buffer.memory)
                return buffer
        return None

    def take(self, structure: Structure, timeout_s: float) -> SnapshotBuffer:
        """A buffer for a snapshot of this structure; `NoFreeBuffer` after `timeout_s`."""

        def order(buffer: SnapshotBuffer) -> tuple[bool, bool, int]:
            # Prefer one that is laid out for the structure; of these, that of the oldest snapshot.
            snapshot = buffer.snapshot
            last = snapshot is not None and snapshot["save_id"] == self.overwritten_last
            age = -1 if snapshot is None else snapshot["number"]
            return last, buffer.structure is not structure, age

        with self._freed:
            with waits():
                is_free = self._freed.wait_for(self._has_free, timeout_s)
            if not is_free:
                raise NoFreeBuffer
            buffer = min((each for each in self.buffers if each.usable), key=order)
            buffer.busy = True
            buffer.turn += 1
        try:
            self._lay_out(buffer, structure, devices.device_in_use())
        except BaseException:
            self.give_back(buffer)
            raise
        return buffer

    def give_back(self, buffer: SnapshotBuffer, turn: int | None = None) -> None:
        """Frees a buffer. Does nothing if `turn` is given and is not the current one."""
        with self._freed:
            if turn is not None and turn != buffer.turn:
                return
            buffer.end_copy()  # before the next save takes it
            buffer.busy = False
            self._freed.notify_all()

    def give_back_all(self) -> None:
        """Frees all buffers; their past users can no longer give them back."""
        self.end_copies()
        with self._freed:
            for buffer in self.all_buffers:
                buffer.busy = False
                buffer.turn += 1
            self._freed.notify_all()

    def reserve(self, buffer: SnapshotBuffer, purpose: object) -> None:
        with self._freed:
            buffer.reserved = purpose

    def unreserve(self, buffer: SnapshotBuffer, purpose: object) -> None:
        with self._freed:
            if buffer.reserved is purpose:
                buffer.reserved = None
                self._freed.notify_all()

    @property
    def has_reserved(self) -> bool:
        return any(buffer.reserved is not None for buffer in self.buffers)

    def unreserve_all(self) -> None:
        """Ends all reservations; what reserved a buffer does not read from it any more."""
        for buffer in self.buffers:
            self.unreserve(buffer, buffer.reserved)

    def preallocate(self, structure: Structure) -> None:
        """Allocates memory for snapshots of this structure in the background, so the first save
        costs no more than later ones. Buffers that have snapshots keep them.
        """
        with self._freed:
            free = [b for b in self.buffers if b.usable and b.snapshot is None]
            fresh = [b for b in free if b.memory is None or not b.memory.is_populated]
            for buffer in fresh:
                buffer.busy = True
        if not fresh:
            return

        device = devices.device_in_use()
        self._end_allocation = end = threading.Event()

        def allocate() -> None:
            for buffer in fresh:
                try:
                    if not end.is_set():
                        self._lay_out(buffer, structure, device)
                    if buffer.memory is not None:  # one thread: the next step needs the processors
                        populate(buffer.memory, 1, end)
                finally:
                    self.give_back(buffer)

        self._writer.start()
        self._allocating = start_thread("outlast-allocate", devices.on_this_device(allocate))

    def take_over(self, socket: Path) -> dict[str, SharedMemory]:
        """Takes over the snapshots of a dead process; returns the memory kept for it, by name."""
        left, kept = take_over(socket)
        for stored in left:
            self.adopt(stored)
        return kept

    def adopt(self, stored: StoredSnapshot) -> SnapshotBuffer:
        """Adds a snapshot from another process; its description has the `index`."""
        number = 1 + max([999, *(buffer.number for buffer in self.handed_over)])
        description, values, memory = stored.description, bytes(stored.values), stored.memory
        buffer = SnapshotBuffer(number, memory, snapshot=description, values=values)
        self.handed_over.append(buffer)
        self._writer.start()
        index = description["index"]
        self._writer.tell(Writer.share_buffer, buffer=number, memory=memory, index=index)
        self._writer.tell(Writer.sealed, buffer=number, snapshot=description, blob=values)
        return buffer

    def release_handed_over(self) -> None:
        """Releases the memory of a dead predecessor's snapshots: there is a newer state."""
        busy = [buffer for buffer in self.handed_over if buffer.busy]
        for buffer in self.handed_over:
            if not buffer.busy:
                self._writer.tell(Writer.release_buffer, buffer=buffer.number)
                buffer.drop_memory()
        self.handed_over = busy

    def end_copies(self) -> None:
        self._end_allocation.set()  # a restart does not wait for it
        if self._allocating is not None:
            self._allocating.join()
        for buffer in self.all_buffers:
            buffer.end_copy()

    def close(self) -> None:
        for buffer in self.all_buffers:
            buffer.drop_memory()
        self.buffers, self.handed_over = [], []

    def _has_free(self) -> bool:
        busy = sum(buffer.busy for buffer in self.buffers)
        # A spare buffer is not for one more save in progress.
        return busy < len(self.buffers) - self._spare and any(
            buffer.usable for buffer in self.buffers
        )

    def _lay_out(
        self, buffer: SnapshotBuffer, structure: Structure, device: torch.device | None
    ) -> None:
        # Before the first byte is overwritten: see `Writer.reuse_buffer`.
        buffer.snapshot = None
        self._writer.tell(Writer.reuse_buffer, buffer=buffer.number)
        memory = buffer.memory
        if buffer.structure is structure and memory is not None and memory.intact:
            return
        buffer.targets = buffer.structure = None
        needed = structure.size_bytes
        if memory is not None and not (
            memory.intact and needed <= memory.size_bytes <= 2 * needed + (1 << 20)
        ):
            self._writer.tell(Writer.release_buffer, buffer=buffer.number)
            buffer.drop_memory()
            memory = None
        if memory is None:
            buffer.memory = memory = SharedMemory(needed)
            if device is not None:
                populate(memory)
                lock = devices.of(device.type).page_lock
                buffer.unlock = lock(memory.address, memory.size_bytes, device.index)
        index = structure.index
        self._writer.tell(Writer.share_buffer, buffer=buffer.number, memory=memory, index=index)
        buffer.targets = without_collections(lambda: structure.inscribe(memory))
        buffer.structure = structure
