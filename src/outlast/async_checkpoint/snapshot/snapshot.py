"""One snapshot of a rank's share: its tensors are copied into a buffer, then it is sealed.

A snapshot is complete when it is sealed without an error, and only the `Snapshot` knows that: the
writer process, the copies to other hosts and the save itself are told by its seal.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from outlast.async_checkpoint.snapshot.buffers import SnapshotBuffer
from outlast.async_checkpoint.snapshot.chunk_copy import ChunkCache, EagerCopy, are_private
from outlast.async_checkpoint.snapshot.device_copy import (
    CopyPair,
    DeviceChunks,
    DeviceCopy,
    on_gpu,
)
from outlast.async_checkpoint.snapshot.overlapped_copy import (
    OverlappedCopy,
    Writes,
    addresses_of_optimizers,
    can_overlap,
    is_contiguous_cpu,
)
from outlast.async_checkpoint.snapshot.structure import Structure
from outlast.async_checkpoint.state_dict import Last
from outlast.async_checkpoint.writer.client import WriterClient
from outlast.async_checkpoint.writer.handover import SnapshotDescription
from outlast.async_checkpoint.writer.main import Writer
from outlast.async_checkpoint.writer.write_files import checksums_of
from outlast.errors import CheckpointError, SaveCancelled


class Snapshot:
    """One snapshot, complete or being copied during training.

    Attributes:
        values: the pickled values, one after another.
        buffer, turn: the buffer that it is copied into, and which use of the buffer it is.
        hashed: whether the copy takes the checksums; otherwise the writer does.
        copy: the overlapped copy, if there is one.
        sealed: set when the copy has ended, successfully or not.
        error: why the snapshot must not be used, once it is sealed.
    """

    def __init__(
        self,
        description: SnapshotDescription,
        values: bytes,
        buffer: SnapshotBuffer,
        writer: WriterClient,
    ) -> None:
        self.description = description
        self.values = values
        self.buffer = buffer
        self.turn = buffer.turn
        self.hashed = False
        self.copy: OverlappedCopy | None = None
        self.sealed = threading.Event()
        self.error: CheckpointError | None = None
        self._writer = writer
        self._now: DeviceCopy | EagerCopy | None = None
        self._outcome: tuple[CheckpointError | None] | None = None
        self._lock = threading.Lock()
        buffer.stop = self.call_off

    @property
    def save_id(self) -> str:
        return self.description["save_id"]

    @property
    def size_bytes(self) -> int:
        return sum(size for _, _, size in self.description["layout"]) + len(self.values)

    def copy_now(self, copy: DeviceCopy | EagerCopy) -> None:
        self._now = copy  # first: an interrupt may come during the copy
        copy.run()
        self._now = None  # what holds the snapshot must not hold the model

    def seal(self) -> None:
        """Waits for the copy and checks it. Called where no write to the tensors is in progress; a
        second call does nothing.
        """
        if self.copy is None:
            return
        self.copy.end()  # in every call: an interrupt may come at any point
        with self._lock:
            if self.sealed.is_set():
                return
            if self._outcome is None:
                self._outcome = (self.copy.found(),)
            # Called again, with the same outcome, if an interrupt cut the first call short.
            self.end(self._outcome[0])
        self.copy.release()

    def end(self, error: CheckpointError | None) -> None:
        """Seals it: complete, or with the error."""
        self.error = error
        number, description = self.buffer.number, self.description
        if error is None:
            if self.hashed:
                assert self.copy is not None
                values = [(description["values"], memoryview(self.values))] if self.values else []
                description["files"] = {**self.copy.checksums(), **checksums_of(values)}
            self.buffer.snapshot, self.buffer.values = description, self.values
            self._writer.tell(Writer.sealed, buffer=number, snapshot=description, blob=self.values)
        else:
            self._writer.tell(Writer.torn, buffer=number, save_id=self.save_id)
        self.sealed.set()

    def call_off(self) -> None:
        """Ends the copy: when this returns, nothing is being copied. If it was not sealed before,
        it cannot be used.
        """
        if self._now is not None:
            self._now.call_off()
        if self.copy is not None:
            self.copy.call_off()
            self.seal()
        if not self.sealed.is_set():  # an interrupt came between the copy and its seal
            self.end(SaveCancelled("the snapshot was called off"))


class Snapshotter:
    """Takes one rank's snapshots. The tensors of `optimizers` are copied during training."""

    def __init__(self, writer: WriterClient, optimizers: Sequence[Optimizer]) -> None:
        self._writer = writer
        self._optimizers = optimizers
        self._now, self._later = ChunkCache(), ChunkCache()
        self._private: Last[bool] = Last()

    def abandon(self) -> None:
        """After the last snapshot: releases the optimizers."""
        self._optimizers = ()

    def take(
        self,
        description: SnapshotDescription,
        values: bytes,
        buffer: SnapshotBuffer,
        structure: Structure,
        leaves: Sequence[Any],
    ) -> Snapshot:
        """A snapshot of the state whose `leaves` these are, as it is now, in a buffer that is laid
        out for its structure.
        """
        memory = buffer.memory
        assert memory is not None
        snapshot = Snapshot(description, values, buffer, self._writer)
        self._writer.start()
        sources = structure.sources(leaves)
        later, now = self._split(list(zip(sources, buffer.targets, strict=True)))
        by_chunks = [pair for pair in now if is_contiguous_cpu(pair[0])]
        by_torch = [pair for pair in now if not is_contiguous_cpu(pair[0])]
        files = structure.files
        # The copy hashes only where training does not wait for it (`snapshot/chunk_copy.py`).
        by_gpu = bool(later) and on_gpu(later[0][0])
        snapshot.hashed = bool(later) and not by_gpu and self._are_private(sources)
        writes = Writes(source for source, _ in now)
        snapshot.copy_now(DeviceCopy(by_torch))
        eager = self._now.chunks(memory, files, by_chunks, hashed=False)
        snapshot.copy_now(EagerCopy(by_chunks, eager))
        error = writes.found("by another thread")
        if error is not None or not later:
            snapshot.hashed = False
            snapshot.end(error)
            return snapshot
        number, save_id, address = buffer.number, snapshot.save_id, memory.address

        def reached(upto: int) -> None:
            self._writer.tell(Writer.copied, buffer=number, save_id=save_id, upto=upto - address)

        chunks = (
            DeviceChunks(later)
            if by_gpu
            else self._later.chunks(memory, files, later, hashed=snapshot.hashed)
        )
        optimizers = self._optimizers
        snapshot.copy = OverlappedCopy(later, chunks, optimizers, snapshot.seal, reached)
        snapshot.copy.start()
        return snapshot

    def _are_private(self, sources: Sequence[torch.Tensor]) -> bool:
        # Sharing a tensor with another process moves it to another address.
        addresses = [source.data_ptr() for source in sources]
        return self._private.of(addresses, lambda: are_private(sources))

    def _split(self, copies: list[CopyPair]) -> tuple[list[CopyPair], list[CopyPair]]:
        if not self._optimizers:
            return [], copies
        owned = addresses_of_optimizers(self._optimizers)
        later: list[CopyPair] = []
        now: list[CopyPair] = []
        for source, to in copies:
            (later if can_overlap(source, owned) else now).append((source, to))
        if any(on_gpu(source) for source, _ in later):
            # Those in CPU memory are few and small, such as Adam's counters of steps.
            now += [pair for pair in later if not on_gpu(pair[0])]
            now.sort(key=lambda pair: pair[1].data_ptr())
            later = [pair for pair in later if on_gpu(pair[0])]
        return later, now
