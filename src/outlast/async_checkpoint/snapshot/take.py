"""Takes the snapshot of a save: who saves what is agreed, and its part of it copied.

What a state dict looks like changes seldom, and is agreed on among the ranks only then; a save of
one that looks as before only looks its tensors up, and copies them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from outlast.async_checkpoint.handle import SaveHandle
from outlast.async_checkpoint.save.folder_session import FolderSession, SnapshotBuffer
from outlast.async_checkpoint.save.pipeline import Save
from outlast.async_checkpoint.save.structure_exchange import StructureExchange
from outlast.async_checkpoint.snapshot.chunks import ChunkCache, are_private, checksums_of_content
from outlast.async_checkpoint.snapshot.copy_now import EagerCopy
from outlast.async_checkpoint.snapshot.copy_overlapped import (
    CopyPair,
    OverlappedCopy,
    Writes,
    addresses_of_optimizers,
    can_overlap,
    copy_by_torch,
    is_contiguous_cpu,
)
from outlast.async_checkpoint.snapshot.structure import Structure, values_file
from outlast.async_checkpoint.state_dict.catalog import Catalog
from outlast.async_checkpoint.state_dict.memo import Described
from outlast.async_checkpoint.state_dict.sharding import walk
from outlast.async_checkpoint.writer.messages import SnapshotCopied, SnapshotSealed, SnapshotTorn
from outlast.errors import CheckpointError, StoreError

__all__ = ["Snapshots"]

log = logging.getLogger("outlast.checkpoint")


class Snapshots:
    """One rank's snapshots.

    Args:
        session: has the memory for them.
        exchange: agrees on structures with the other ranks.
        described: what this process remembers of state dicts.
        optimizers: what only they change is copied beside the training.
        rank, world_size: of the checkpointer.
        job: begins the names of its saves.
    """

    def __init__(
        self,
        session: FolderSession,
        exchange: StructureExchange,
        described: Described,
        optimizers: Sequence[Optimizer],
        rank: int,
        world_size: int,
        job: str,
    ) -> None:
        self._session = session
        self._exchange = exchange
        self._described = described
        self._optimizers = optimizers
        self._rank = rank
        self._world_size = world_size
        self._job = job
        self._signature: list[Any] = []
        self._structure: Structure | None = None
        self._now, self._later = ChunkCache(), ChunkCache()
        self._private: tuple[list[int], bool] | None = None

    def take(
        self, index: int, step: int, metric: float | None, state_dict: Mapping[str, Any]
    ) -> Save:
        """A snapshot of `state_dict` as it is now: whole when this returns, or being copied beside
        the training. See `Checkpointer.save`.
        """
        found: list[Any] = []
        leaves: list[Any] = []
        walk(state_dict, found, leaves)
        structure, catalog, changed = self._structure_of(index, state_dict, found)
        buffer = self._session.take(structure)
        try:
            save = self._describe(index, step, metric, state_dict, structure, buffer)
            save.changed, save.catalog = changed, catalog
            self._copy(save, leaves, structure)
        except BaseException:
            self._session.give_back(buffer)
            raise
        return save

    def prepare(self, index: int, state_dict: Mapping[str, Any]) -> None:
        """What is restored will be saved: so who saves what is agreed now, and memory allocated."""
        found: list[Any] = []
        try:
            walk(state_dict, found, [])
            structure, _, _ = self._structure_of(index, state_dict, found)
        except (CheckpointError, ValueError) as e:
            # The same error comes from the first save, where it belongs.
            log.debug("nothing was prepared for saves: %s", e)
            with contextlib.suppress(StoreError):
                self._exchange.refuse(index, str(e))
        else:
            self._session.prepare(structure)

    def let_go(self) -> None:
        """Holds the training's optimizers no longer; there will be no more snapshots."""
        self._optimizers = ()

    def _structure_of(
        self, index: int, state_dict: Mapping[str, Any], found: list[Any]
    ) -> tuple[Structure, Catalog | None, bool]:
        if self._structure is not None and found == self._signature:
            return self._structure, self._exchange.alone, False
        self._structure, catalog = self._exchange.changed(index, self._described.items(state_dict))
        self._structure.number(state_dict)
        self._signature = found
        return self._structure, catalog, True

    def _describe(
        self,
        index: int,
        step: int,
        metric: float | None,
        state_dict: Mapping[str, Any],
        structure: Structure,
        buffer: SnapshotBuffer,
    ) -> Save:
        values, places = structure.pickle_values(state_dict)
        save_id = f"{self._job}{index:08x}"
        working, final = self._session.storage.names_for(step, save_id)
        snapshot = {
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
        handle = SaveHandle(step, lambda: save.copy.seal() if save.copy is not None else None)
        save = Save(index, step, metric, handle, buffer, snapshot, values, places, False, None)
        save.turn = buffer.turn
        return save

    def _copy(self, save: Save, leaves: list[Any], structure: Structure) -> None:
        buffer = save.buffer
        assert buffer.memory is not None
        memory = buffer.memory
        sources = structure.sources(leaves)
        later, now = self._split(list(zip(sources, buffer.targets, strict=True)))

        writer = self._session.writer
        number, save_id = buffer.number, save.snapshot["save_id"]

        def sealed(error: CheckpointError | None) -> None:
            save.torn = error
            if error is None:
                if chunks.hashed:
                    values = save.snapshot["values"]
                    small = checksums_of_content(values, save.values) if values else {}
                    save.snapshot["files"] = {**chunks.told(), **small}
                buffer.snapshot, buffer.values = save.snapshot, save.values
                writer.tell(SnapshotSealed(buffer=number, snapshot=save.snapshot, blob=save.values))
            else:
                writer.tell(SnapshotTorn(buffer=number, save_id=save_id))
            save.sealed.set()

        def reached(address: int) -> None:
            upto = address - memory.address
            writer.tell(SnapshotCopied(buffer=number, save_id=save_id, upto=upto))

        writer.start()
        in_rows = [each for each in now if is_contiguous_cpu(each[0])]
        others = [each for each in now if not is_contiguous_cpu(each[0])]
        files = structure.layout.files
        # On the way, where nobody waits for it.
        hashed = save.hashed = bool(later) and self._are_private(sources)
        writes = Writes(source for source, _ in now)
        copy_by_torch(others)
        chunks = self._now.chunks(memory, files, in_rows, hashed=False)
        buffer.copy = eager = EagerCopy(in_rows, chunks)
        eager.run()
        error = writes.found("by another thread")
        if error is not None or not later:
            sealed(error)
        else:
            chunks = self._later.chunks(memory, files, later, hashed=hashed)
            save.copy = buffer.copy = OverlappedCopy(
                later, chunks, self._optimizers, sealed, reached
            )
            save.copy.start()
        self._session.release_handed_over()

    def _are_private(self, sources: Sequence[torch.Tensor]) -> bool:
        addresses = [source.data_ptr() for source in sources]
        if self._private is None or self._private[0] != addresses:
            # Whoever has a tensor shared moves it to other memory.
            self._private = (addresses, are_private(sources))
        return self._private[1]

    def _split(self, copies: list[CopyPair]) -> tuple[list[CopyPair], list[CopyPair]]:
        if not self._optimizers:
            return [], copies
        owned = addresses_of_optimizers(self._optimizers)
        later: list[CopyPair] = []
        now: list[CopyPair] = []
        for source, to in copies:
            (later if can_overlap(source, owned) else now).append((source, to))
        return later, now
