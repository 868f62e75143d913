"""One snapshot of a rank's share: its tensors are copied into a buffer, then it is sealed.

A snapshot is complete when it is sealed without an error, and only the `Snapshot` knows that: the
writer process, the copies to other hosts and the save itself are told by its seal.

An eager save returns when everything is copied. An overlapped save returns at once: tensors that
only an optimizer changes (its parameters and its state) are copied during the next forward and
backward pass, by a thread, or by the device while a thread waits for it. The optimizer's `step`
waits, in a torch hook, for the rest. All others, such as batch-norm statistics, are copied at once;
and so are small tensors, if there are many.

A snapshot must be the state at the moment of the save (C2), so a write to a tensor that is still
being copied must be detected. torch counts the writes to a tensor (`_version`); a write counts when
it ends. So the counts are compared not when the copy ends, but later, on the training thread, when
the snapshot is sealed: no write of that thread is in progress there, and every write that began
before has been counted. Copied bytes are written to files before that, but never committed: no rank
reports that it has finished before its snapshot is sealed.

A write that torch does not count (through `.data`, numpy or a raw pointer) to a tensor of an
optimizer, between `save` and `step`, is not detected: such code needs an eager save.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from outlast.async_checkpoint.snapshot.buffers import SnapshotBuffer
from outlast.async_checkpoint.snapshot.chunk_copy import ChunkCache, Chunks, EagerCopy, copy_small
from outlast.async_checkpoint.snapshot.device_copy import DeviceChunks, DeviceCopy
from outlast.async_checkpoint.snapshot.overlap import (
    WORTH_A_CALL,
    Writes,
    addresses_of_optimizers,
    can_overlap,
)
from outlast.async_checkpoint.snapshot.structure import Structure
from outlast.async_checkpoint.state_dict import Last
from outlast.async_checkpoint.writer.client import WriterClient
from outlast.async_checkpoint.writer.handover import SnapshotDescription
from outlast.async_checkpoint.writer.main import Writer
from outlast.async_checkpoint.writer.write_files import checksums_of
from outlast.errors import CheckpointError, SaveCancelled, TornSnapshot
from outlast.system.devices import on_accelerator, on_this_device
from outlast.system.parallel import start_unawaited

# The writer, which writes pieces of this size, is notified whenever this much has been copied.
_REPORTED_BYTES = 16 << 20
_FEW = 32  # small tensors, which can be copied during training
TORN = "before the optimizer's step, during the copy of a save"
"""In the message of a `TornSnapshot`, on all ranks."""


class Snapshot:
    """One snapshot, complete or being copied during training.

    Attributes:
        values: the pickled values, one after another.
        buffer, turn: the buffer that it is copied into, and which use of the buffer it is.
        hashed: whether the copy takes the checksums; otherwise the writer does.
        sealed: set when the copy has ended, successfully or not.
        error: why the snapshot must not be used, once it is sealed.
    """

    def __init__(
        self,
        description: SnapshotDescription,
        values: bytes,
        buffer: SnapshotBuffer,
        writer: WriterClient,
        *,
        is_sealed: bool = False,
    ) -> None:
        self.description, self.values, self.buffer = description, values, buffer
        self.turn = buffer.turn
        self.hashed = False
        self.sealed = threading.Event()
        if is_sealed:  # before the buffer can end it
            self.sealed.set()
        self.error: CheckpointError | None = None
        self._writer = writer
        self._now: DeviceCopy | EagerCopy | None = None
        # Of the copy during training:
        self._threads: list[int] = []
        self._hook: RemovableHandle | None = None
        self._copies: object = ()  # keeps the memory alive, on both sides
        self._chunks: Chunks | DeviceChunks | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._writes = Writes(())
        self._called_off = False
        self._copy_error: BaseException | None = None
        self._copied = threading.Event()  # the copy has ended
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

    def copy_later(
        self,
        copies: object,
        chunks: Chunks | DeviceChunks,
        optimizers: Sequence[Optimizer],
        writes: Writes,
    ) -> None:
        """Copies contiguous tensors in a thread, and makes the optimizers' steps wait for that.
        `chunks` make the copies, in the order of their addresses; `copies` hold the memory.
        """
        self._copies, self._chunks, self._optimizers = copies, chunks, optimizers
        self._writes = writes
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        start_unawaited(on_this_device(self._copy), self._threads)

    def seal(self) -> None:
        """Waits for the copy and checks it, once; where no write to the tensors is in progress."""
        if self._chunks is None:
            return
        # In every call: an interrupt may come at any point.
        if self._threads:  # else it is never started
            self._await_copy()
        if self._hook is not None:
            self._hook.remove()
        with self._lock:
            if self.sealed.is_set():
                return
            if self._outcome is None:
                self._outcome = (self._copy_failure(),)
            # Called again, with the same outcome, if an interrupt cut the first call short.
            self.end(self._outcome[0])
        # What holds the snapshot must not hold the model.
        self._copies, self._optimizers, self._chunks, self._writes = (), (), None, Writes(())

    def end(self, error: CheckpointError | None) -> None:
        self.error = error
        number, description = self.buffer.number, self.description
        if error is None:
            if self.hashed:
                assert self._chunks is not None
                values = [(description["values"], memoryview(self.values))] if self.values else []
                description["files"] = {**self._chunks.checksums(), **checksums_of(values)}
            self.buffer.snapshot, self.buffer.values = description, self.values
            if self.buffer.memory is not None:
                self.buffer.memory.is_populated = True
            self._writer.tell(Writer.sealed, buffer=number, snapshot=description, blob=self.values)
        else:
            self._writer.tell(Writer.torn, buffer=number, save_id=self.save_id)
        self.sealed.set()

    def call_off(self) -> None:
        """When this returns, nothing is being copied. Unless sealed before, it cannot be used."""
        if self._now is not None:
            self._now.call_off()
        self._called_off = True
        self.seal()
        if not self.sealed.is_set():  # an interrupt came between the copy and its seal
            self.end(SaveCancelled("the snapshot was called off"))

    def _copy_failure(self) -> CheckpointError | None:
        """Why what was copied cannot be used, after the end of the copy."""
        if self._called_off:
            return SaveCancelled("the snapshot was called off")
        if not self._copied.is_set():  # the thread was never started
            return CheckpointError("the snapshot was never copied")
        if self._copy_error is not None:
            return CheckpointError(f"the copy of a tensor failed: {self._copy_error}")
        written = self._writes.found()
        return TornSnapshot(f"{written} {TORN}") if written else None

    def _await_copy(self) -> None:
        # Nothing can `join` the thread; and after an interrupted `join`, a thread that is still
        # copying counts as dead (Python 3.11, bpo-45274).
        self._copied.wait()

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if any(optimizer is each for each in self._optimizers):
            self.seal()

    # --------------------------------------------------------------------- on the copying thread

    def _copy(self) -> None:
        try:
            chunks = self._chunks
            assert chunks is not None
            try:
                self._fill_all(chunks)
            finally:
                chunks.settle()
            if not self._called_off:
                self._reached(sys.maxsize)
        except BaseException as e:  # noqa: BLE001 - the seal reports it on the training thread
            self._copy_error = e
        finally:
            self._copied.set()

    def _fill_all(self, chunks: Chunks | DeviceChunks) -> None:
        reported = 0
        for number in range(len(chunks)):
            if self._called_off:
                return
            upto = self._fill(chunks, number)
            reported = reported or upto
            if upto - reported >= _REPORTED_BYTES:
                reported = upto
                self._reached(upto)

    def _fill(self, chunks: Chunks | DeviceChunks, number: int) -> int:
        return chunks.fill(number, lambda: self._called_off)

    def _reached(self, address: int) -> None:
        buffer, memory = self.buffer.number, self.buffer.memory
        assert memory is not None
        upto = address - memory.address
        self._writer.tell(Writer.copied, buffer=buffer, save_id=self.save_id, upto=upto)


class Snapshotter:
    """Takes one rank's snapshots. The tensors of `optimizers` are copied during training."""

    def __init__(self, writer: WriterClient, optimizers: Sequence[Optimizer]) -> None:
        self._writer, self._optimizers = writer, optimizers
        self._now, self._later = ChunkCache(), ChunkCache()
        self._private: Last[bool] = Last()

    def abandon(self) -> None:
        """Releases the optimizers: what is left to save is copied at once. On any thread."""
        self._optimizers = ()

    def take(
        self,
        description: SnapshotDescription,
        values: bytes,
        buffer: SnapshotBuffer,
        structure: Structure,
        leaves: Sequence[Any],
    ) -> Snapshot:
        """A snapshot of these `leaves` of a state, in a buffer laid out for its structure."""
        memory, target = buffer.memory, buffer.targets
        assert memory is not None
        assert target is not None
        snapshot = Snapshot(description, values, buffer, self._writer)
        self._writer.start()
        with torch.no_grad():  # as in a restore: the views of DTensors
            sources, addresses = structure.sources(leaves)
        optimizers = self._optimizers  # another thread may call `abandon`
        extents, files = structure.extents, structure.files
        # Of many small tensors, none is worth the work for a view and for a part of a chunk.
        small = structure.small if len(structure.small) > _FEW else ()
        moved = [
            i for i in small if addresses[i] and sources[i].is_cpu and sources[i].is_contiguous()
        ]
        rest = sorted(set(range(len(sources))).difference(moved))
        later, now = self._split(rest, sources, addresses, optimizers if rest else ())
        large = [i for i in now if extents[i].data_bytes >= WORTH_A_CALL]
        by_chunks = [
            i for i in large if addresses[i] and sources[i].is_cpu and sources[i].is_contiguous()
        ]
        by_torch = sorted(set(now).difference(by_chunks))
        # The copy hashes only where training does not wait for it (`snapshot/chunk_copy.py`).
        by_device = bool(later) and on_accelerator(sources[later[0]])
        snapshot.hashed = (
            bool(later) and not by_device and self._are_private(later, sources, addresses)
        )

        def writes_to(numbers: Sequence[int]) -> Writes:
            some = [sources[i] for i in numbers]  # a temporary copy must not stay until the step

            def name_of(tensor: torch.Tensor) -> str:
                pairs = zip(numbers, some, strict=True)
                return next(structure.tensors[i].name for i, each in pairs if each is tensor)

            return Writes(some, name_of)

        def chunks_of(cache: ChunkCache, numbers: Sequence[int], *, hashed: bool) -> Chunks:
            places = [extents[i][-2:] for i in numbers]
            return cache.chunks(memory, files, places, [addresses[i] for i in numbers], hashed)

        # All from one moment: else another thread's write could fall between the two.
        writes, writes_later = writes_to([*moved, *now]), writes_to(later)
        held = memory.view[:], sources  # keeps it mapped, whoever closes it meanwhile
        copy_small(
            (memory.address + extents[i].buffer_at, addresses[i], extents[i].data_bytes)
            for i in moved
        )
        if by_torch:
            snapshot.copy_now(DeviceCopy([(sources[i], target(i)) for i in by_torch]))
        if by_chunks:
            eager = chunks_of(self._now, by_chunks, hashed=False)
            snapshot.copy_now(EagerCopy(held, eager))
        written = writes.found()
        if written or not later:
            held[0].release()  # now, whatever else still holds it
            snapshot.hashed = False
            error = f"{written} by another thread, during the copy: the snapshot is torn"
            snapshot.end(CheckpointError(error) if written else None)
            return snapshot
        chunks = (
            DeviceChunks([(sources[i], target(i)) for i in later])
            if by_device
            else chunks_of(self._later, later, hashed=snapshot.hashed)
        )
        kept = held[0], [sources[i] for i in later]
        snapshot.copy_later(kept, chunks, optimizers, writes_later)
        return snapshot

    def _are_private(
        self, numbers: list[int], sources: Sequence[torch.Tensor], addresses: Sequence[int]
    ) -> bool:
        """Whether only this process can write to the tensors, in CPU memory."""
        # Sharing a tensor with another process moves it to another address.
        shared = (sources[i].untyped_storage().is_shared() for i in numbers)
        return self._private.of([addresses[i] for i in numbers], lambda: not any(shared))

    @staticmethod
    def _split(
        numbers: list[int],
        sources: Sequence[torch.Tensor],
        addresses: Sequence[int],
        optimizers: Sequence[Optimizer],
    ) -> tuple[list[int], list[int]]:
        if not optimizers:
            return [], numbers
        owned = addresses_of_optimizers(optimizers)
        later = [i for i in numbers if addresses[i] in owned and can_overlap(sources[i])]
        if any(on_accelerator(sources[i]) for i in later):
            # Those in CPU memory are few and small, such as Adam's counters of steps.
            later = [i for i in later if on_accelerator(sources[i])]
        return later, sorted(set(numbers).difference(later))
