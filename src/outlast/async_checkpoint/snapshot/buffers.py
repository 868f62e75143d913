"""The snapshot buffers of a process: allocated once, used by one save at a time, shared with the
writer.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from outlast.async_checkpoint.snapshot.device_copy import PinnedMemory, device_in_use
from outlast.async_checkpoint.snapshot.structure import Structure
from outlast.async_checkpoint.writer.client import WriterClient
from outlast.async_checkpoint.writer.handover import take_over
from outlast.async_checkpoint.writer.messages import (
    BufferReused,
    ReleaseBuffer,
    SnapshotDescription,
    SnapshotSealed,
)
from outlast.system.shared_memory import SharedMemory, populate

log = logging.getLogger("outlast.checkpoint")


class InProgress(Protocol):
    """What a buffer needs to know of the snapshot that is being taken in it (`snapshot.py`)."""

    def call_off(self) -> None:
        """Ends the copy into the buffer: when this returns, nothing is being copied."""


class NoFreeBuffer(Exception):
    """Saves in progress use all buffers."""


@dataclasses.dataclass
class SnapshotBuffer:
    """Memory for one snapshot.

    Attributes:
        number: names it in the writer.
        pinned: its registration with CUDA, if the process uses CUDA.
        targets: views into it, one for each tensor of the structure that it is laid out for.
        snapshot, values: the sealed snapshot in it, if there is one, and its pickled values.
        in_progress: the last snapshot taken in it, whose copy may still be running.
        turn: counts its users: a past user cannot give it back.
        reserved: for what no save may use it: its snapshot is being copied to another host.
    """

    number: int
    memory: SharedMemory | None = None
    pinned: PinnedMemory | None = None
    structure: Structure | None = None
    targets: Sequence[torch.Tensor] = ()
    busy: bool = False
    snapshot: SnapshotDescription | None = None
    values: bytes = b""
    in_progress: InProgress | None = None
    turn: int = 0
    reserved: object = None

    @property
    def usable(self) -> bool:
        """Whether a save may use it."""
        return not self.busy and self.reserved is None

    def call_off(self) -> None:
        """Ends the copy into it: when this returns, nothing is being written into it."""
        if self.in_progress is not None:
            self.in_progress.call_off()
            self.in_progress = None

    def drop_memory(self) -> None:
        """Releases its memory."""
        self.targets, self.structure = (), None
        pinned, self.pinned = self.pinned, None
        if pinned is not None:
            pinned.unpin()
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.close()


class BufferPool:
    """The buffers for saves, and those that were `handed_over` by a dead process of this rank,
    until there is a newer snapshot. The snapshot of the save `precious` is overwritten last.
    """

    def __init__(self, writer: WriterClient) -> None:
        self.buffers: list[SnapshotBuffer] = []
        self.handed_over: list[SnapshotBuffer] = []
        self._writer = writer
        self._freed = threading.Condition()
        self._allocating: threading.Thread | None = None
        self.precious = ""
        self._spare = 0

    def grow(self, count: int, spare: int = 0) -> None:
        """Grows the pool to at least `count` buffers for saves in progress, and as many more as may
        be reserved at a time.
        """
        self._spare = spare
        while len(self.buffers) < count + spare:
            self.buffers.append(SnapshotBuffer(len(self.buffers)))

    def take(self, structure: Structure, timeout_s: float) -> SnapshotBuffer:
        """A buffer for a snapshot of this structure; waits until one is free.

        Raises:
            NoFreeBuffer: after `timeout_s`.
        """
        with self._freed:
            if not self._freed.wait_for(self._has_free, timeout_s):
                raise NoFreeBuffer
            free = [buffer for buffer in self.buffers if buffer.usable]
            # Prefer one that is laid out for the structure; of these, the one with the oldest
            # snapshot.
            buffer = min(
                free,
                key=lambda b: (self._is_precious(b), b.structure is not structure, _age(b)),
            )
            buffer.busy = True
            buffer.turn += 1
        try:
            self._lay_out(buffer, structure, device_in_use())
        except BaseException:
            self.give_back(buffer)
            raise
        return buffer

    def give_back(self, buffer: SnapshotBuffer, turn: int | None = None) -> None:
        """Frees a buffer. Does nothing if `turn` is given and is not the current one."""
        with self._freed:
            if turn is not None and turn != buffer.turn:
                return
            buffer.call_off()  # before the next save takes it
            buffer.busy = False
            self._freed.notify_all()

    def reserve(self, buffer: SnapshotBuffer, purpose: object) -> None:
        """Keeps saves from using this buffer."""
        with self._freed:
            buffer.reserved = purpose

    def unreserve(self, buffer: SnapshotBuffer, purpose: object) -> None:
        """Ends the reservation for this purpose, unless it has ended already."""
        with self._freed:
            if buffer.reserved is purpose:
                buffer.reserved = None
                self._freed.notify_all()

    @property
    def has_reserved(self) -> bool:
        """Whether a buffer is reserved."""
        return any(buffer.reserved is not None for buffer in self.buffers)

    def unreserve_all(self) -> None:
        """Ends all reservations; what reserved a buffer does not read from it any more."""
        with self._freed:
            for buffer in self.buffers:
                buffer.reserved = None
            self._freed.notify_all()

    def give_back_all(self) -> None:
        """Frees all buffers; their past users can no longer give them back."""
        self._await_allocation()
        with self._freed:
            for buffer in self.buffers:
                buffer.call_off()
                buffer.busy = False
                buffer.turn += 1
            self._freed.notify_all()

    def preallocate(self, structure: Structure) -> None:
        """Allocates memory for snapshots of this structure in the background, so the first save
        costs no more than later ones. Buffers that have memory keep it, and their snapshots.
        """
        with self._freed:
            fresh = [b for b in self.buffers if b.memory is None and not b.busy]
            for buffer in fresh:
                buffer.busy = True
        if not fresh:
            return

        device = device_in_use()  # of this thread: a new one has device 0

        def allocate() -> None:
            for buffer in fresh:
                try:
                    self._lay_out(buffer, structure, device)
                finally:
                    self.give_back(buffer)

        self._writer.start()
        self._allocating = threading.Thread(target=allocate, name="outlast-allocate", daemon=True)
        self._allocating.start()

    def take_over(self, socket: Path) -> SharedMemory | None:
        """Takes over the snapshots that a dead process of this rank left in memory; returns the
        memory that its writer kept for it, if there is any.
        """
        left = take_over(socket)
        for handed in left.snapshots:
            size_bytes = os.fstat(handed.descriptor).st_size
            if size_bytes < max(
                (at + size for _, at, size in handed.snapshot["layout"]), default=1
            ):
                log.warning(
                    "the memory with the snapshot of step %d is lost; a checkpoint is used instead",
                    handed.snapshot["step"],
                )
                os.close(handed.descriptor)
                continue
            memory = SharedMemory(size_bytes, handed.descriptor)
            self.adopt(handed.snapshot, handed.values, memory, handed.snapshot["index"])
        if left.kept < 0:
            return None
        size_bytes = os.fstat(left.kept).st_size
        if not size_bytes:  # lost
            os.close(left.kept)
            return None
        return SharedMemory(size_bytes, left.kept)

    def adopt(
        self, snapshot: SnapshotDescription, values: bytes, memory: SharedMemory, index: str
    ) -> SnapshotBuffer:
        """Adds a snapshot of this rank that another process has made, until there is a newer one.
        `index` says what it holds and where (`Structure.index`).
        """
        self._writer.start()
        number = 1000 + len(self.handed_over)
        buffer = SnapshotBuffer(number, memory, snapshot=snapshot, values=values)
        self.handed_over.append(buffer)
        self._writer.share(number, memory, index.encode())
        self._writer.tell(SnapshotSealed(buffer=number, snapshot=snapshot, blob=values))
        return buffer

    def release_handed_over(self) -> None:
        """Releases the memory of a dead predecessor's snapshots: there is a newer state."""
        for buffer in self.handed_over:
            self._writer.tell(ReleaseBuffer(buffer=buffer.number))
            self._writer.forget(buffer.number)
            buffer.drop_memory()
        self.handed_over = []

    def end_copies(self) -> None:
        """Ends all copies: nothing is written into any buffer after this returns."""
        self._await_allocation()
        for buffer in self.buffers:
            if buffer.in_progress is not None:
                buffer.in_progress.call_off()

    def close(self) -> None:
        """Releases all memory."""
        for buffer in (*self.buffers, *self.handed_over):
            buffer.drop_memory()
        self.buffers, self.handed_over = [], []

    def _has_free(self) -> bool:
        busy = sum(buffer.busy for buffer in self.buffers)
        # A spare buffer is not for one more save in progress.
        return busy < len(self.buffers) - self._spare and any(
            buffer.usable for buffer in self.buffers
        )

    def _is_precious(self, buffer: SnapshotBuffer) -> bool:
        snapshot = buffer.snapshot
        return snapshot is not None and snapshot["save_id"] == self.precious

    def _await_allocation(self) -> None:
        if self._allocating is not None:
            self._allocating.join()

    def _lay_out(self, buffer: SnapshotBuffer, structure: Structure, device: int | None) -> None:
        # Before the first byte is overwritten: see `Writer._note`.
        buffer.snapshot = None
        self._writer.tell(BufferReused(buffer=buffer.number))
        memory = buffer.memory
        intact = memory is not None and memory.intact
        if buffer.structure is structure and intact:
            return
        buffer.targets, buffer.structure = (), None
        needed = structure.layout.size_bytes
        fits = memory is not None and needed <= memory.size_bytes <= 2 * needed + (1 << 20)
        if memory is None or not intact or not fits:
            if memory is not None:
                self._writer.forget(buffer.number)
                buffer.drop_memory()
            buffer.memory = memory = SharedMemory(needed)
            populate(memory)
            if device is not None:
                buffer.pinned = PinnedMemory.pin(memory, device)
        self._writer.share(buffer.number, memory, structure.index)
        structure.layout.inscribe(memory, structure.tensors)
        buffer.targets = structure.targets(memory)
        buffer.structure = structure


def _age(buffer: SnapshotBuffer) -> int:
    return -1 if buffer.snapshot is None else buffer.snapshot["number"]
