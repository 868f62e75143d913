"""Takes the snapshot of a save: its values are pickled, its tensors copied into a buffer."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from outlast.async_checkpoint.observers import notify_saving
from outlast.async_checkpoint.save.folder_session import FolderSession
from outlast.async_checkpoint.snapshot.buffers import SnapshotBuffer
from outlast.async_checkpoint.snapshot.chunk_copy import ChunkCache, Chunks, are_private
from outlast.async_checkpoint.snapshot.device_copy import (
    CopyPair,
    DeviceChunks,
    DeviceCopy,
    on_gpu,
)
from outlast.async_checkpoint.snapshot.eager_copy import EagerCopy
from outlast.async_checkpoint.snapshot.overlapped_copy import (
    OverlappedCopy,
    Writes,
    addresses_of_optimizers,
    can_overlap,
    is_contiguous_cpu,
)
from outlast.async_checkpoint.snapshot.structure import Structure, values_file
from outlast.async_checkpoint.state_dict.last_value import Last
from outlast.async_checkpoint.writer.messages import (
    SnapshotCopied,
    SnapshotDescription,
    SnapshotSealed,
    SnapshotTorn,
)
from outlast.async_checkpoint.writer.write_files import checksums_of
from outlast.errors import CheckpointError


@dataclasses.dataclass
class Snapshot:
    """One snapshot, complete or being copied during training.

    Attributes:
        buffer, turn: the buffer that it is copied into, and which use of the buffer it is.
        hashed: whether the copy takes the checksums; otherwise the writer does.
        copy: the overlapped copy, if there is one.
        sealed: set when the copy has ended, successfully or not.
        error: why the snapshot must not be used, once it is sealed.
    """

    description: SnapshotDescription
    values: bytes
    buffer: SnapshotBuffer
    turn: int
    hashed: bool = False
    copy: OverlappedCopy | None = None
    sealed: threading.Event = dataclasses.field(default_factory=threading.Event)
    error: CheckpointError | None = None

    @property
    def save_id(self) -> str:
        """The id of its save."""
        return self.description["save_id"]

    @property
    def size_bytes(self) -> int:
        """The size of all its files."""
        return sum(size for _, _, size in self.description["layout"]) + len(self.values)

    def seal(self) -> None:
        """Waits for the copy and checks it. Called where no write to the tensors is in progress."""
        if self.copy is not None:
            self.copy.seal()

    def call_off(self, error: CheckpointError) -> None:
        """Ends the copy. If it was not sealed, `error` is the reason."""
        if self.copy is not None:
            self.copy.call_off()
        if not self.sealed.is_set():  # an interrupt came between the copy and its seal
            self.error = error
            self.sealed.set()


class Snapshotter:
    """Takes one rank's snapshots. The ids of its saves begin with `job`. Each snapshot is also
    copied to another host, if the session does so.
    """

    def __init__(
        self,
        session: FolderSession,
        optimizers: Sequence[Optimizer],
        rank: int,
        world_size: int,
        job: str,
    ) -> None:
        self._session = session
        self._optimizers = optimizers
        self._rank = rank
        self._world_size = world_size
        self._job = job
        self._copies = session.copies
        self._now, self._later = ChunkCache(), ChunkCache()
        self._private: Last[bool] = Last()

    def take(
        self,
        index: int,
        step: int,
        state_dict: Mapping[str, Any],
        structure: Structure,
        leaves: Sequence[Any],
        timeout_s: float,
    ) -> Snapshot:
        """A snapshot of `state_dict` as it is now.

        Raises:
            NoFreeBuffer: if no buffer becomes free within `timeout_s`.
        """
        buffer = self._session.pool.take(structure, timeout_s)
        try:
            snapshot = self._describe(index, step, state_dict, structure, buffer)
            notify_saving()
            self._copy(snapshot, leaves, structure)
        except BaseException:
            self._session.pool.give_back(buffer)
            raise
        if self._copies is not None:
            self._copies.submit(index, step, snapshot)
        return snapshot

    def refuse(self, index: int, step: int, error: BaseException) -> None:
        """This rank has no snapshot of a save."""
        if self._copies is not None:
            self._copies.refuse(index, step, str(error))

    def abandon(self) -> None:
        """After the last snapshot: ends its copy to another host, and releases the optimizers."""
        if self._copies is not None:
            self._copies.abandon()
        self._optimizers = ()

    def _describe(
        self,
        index: int,
        step: int,
        state_dict: Mapping[str, Any],
        structure: Structure,
        buffer: SnapshotBuffer,
    ) -> Snapshot:
        values, places = structure.pickle_values(state_dict)
        save_id = f"{self._job}{index:08x}"
        working, final = self._session.storage.names_for(step, save_id)
        description: SnapshotDescription = {
            "step": step,
            "number": index,
            "save_id": save_id,
            "folder_id": self._session.identity,
            "rank": self._rank,
            "world_size": self._world_size,
            "working": working,
            "final": final,
            "layout": structure.layout.files,
            "values": values_file(self._rank) if values else "",
            "places": places,
            "socket": str(self._session.socket_path(self._rank, self._world_size)),
        }
        return Snapshot(description, values, buffer, buffer.turn)

    def _copy(self, snapshot: Snapshot, leaves: Sequence[Any], structure: Structure) -> None:
        buffer, writer = snapshot.buffer, self._session.writer
        memory = buffer.memory
        assert memory is not None
        number, save_id = buffer.number, snapshot.save_id

        def sealed(error: CheckpointError | None) -> None:
            snapshot.error = error
            if error is None:
                description = snapshot.description
                if chunks.hashed:
                    name = description["values"]
                    values = {name: snapshot.values} if name else {}
                    description["files"] = {
                        **chunks.checksums(),
                        **checksums_of(memory.view, (), values),
                    }
                buffer.snapshot, buffer.values = description, snapshot.values
                writer.tell(
                    SnapshotSealed(buffer=number, snapshot=description, blob=snapshot.values)
                )
            else:
                writer.tell(SnapshotTorn(buffer=number, save_id=save_id))
            snapshot.sealed.set()

        def reached(address: int) -> None:
            upto = address - memory.address
            writer.tell(SnapshotCopied(buffer=number, save_id=save_id, upto=upto))

        writer.start()
        sources = structure.sources(leaves)
        later, now = self._split(list(zip(sources, buffer.targets, strict=True)))
        by_chunks = [pair for pair in now if is_contiguous_cpu(pair[0])]
        by_torch = [pair for pair in now if not is_contiguous_cpu(pair[0])]
        files = structure.layout.files
        # The copy hashes only where training does not wait for it (`snapshot/chunk_copy.py`).
        by_gpu = bool(later) and on_gpu(later[0][0])
        hashed = bool(later) and not by_gpu and self._are_private(sources)
        snapshot.hashed = hashed
        writes = Writes(source for source, _ in now)
        buffer.copy = by_device = DeviceCopy(by_torch)
        by_device.run()
        chunks: Chunks | DeviceChunks
        chunks = self._now.chunks(memory, files, by_chunks, hashed=False)
        buffer.copy = eager = EagerCopy(by_chunks, chunks)
        eager.run()
        error = writes.found("by another thread")
        if error is not None or not later:
            sealed(error)
        else:
            chunks = (
                DeviceChunks(later)
                if by_gpu
                else self._later.chunks(memory, files, later, hashed=hashed)
            )
            snapshot.copy = buffer.copy = OverlappedCopy(
                later, chunks, self._optimizers, sealed, reached
            )
            snapshot.copy.start()
        self._session.pool.release_handed_over()

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
