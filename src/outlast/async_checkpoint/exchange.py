"""Agrees which rank saves what, and keeps the result: the catalog of what a checkpoint holds.

A rank whose state dict has a new structure tells its parts and waits for the answer; one whose
structure is as before says so from a background thread, and does not wait. Rank 0 hears all ranks
at every save. If some have changed, it shares their parts out again, while ranks that have not
changed keep what they had: they are saving it already.
"""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from outlast.async_checkpoint.failure import CallFailure
from outlast.async_checkpoint.ledger import CallLedger
from outlast.async_checkpoint.manifest import Shard, TensorEntry, ValueEntry
from outlast.async_checkpoint.plan import Item, Key, decode_items, encode_items, share_out
from outlast.async_checkpoint.snapshot import Structure, values_file
from outlast.coordination import KeyTimeout
from outlast.errors import CheckpointError

__all__ = ["Catalog", "Exchange"]


class Catalog:
    """What a checkpoint of the whole job holds, and where. What it says never changes.

    Args:
        structures: of each rank.
    """

    def __init__(self, structures: Mapping[int, Structure]) -> None:
        self.structures = dict(structures)
        self.tensors: dict[str, TensorEntry] = {}
        self._described: dict[str, Any] = {}
        self._stored: dict[MetadataIndex, _StorageInfo] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._last: tuple[dict[str, ValueEntry], bytes] | None = None
        for structure in self.structures.values():
            self._add(structure)

    def values(self, places: Mapping[int, Sequence[Sequence[int]]]) -> dict[str, ValueEntry]:
        """Where the values lie, from what each rank says of its own."""
        found = {}
        for rank, structure in self.structures.items():
            for item, (at, size_bytes) in zip(structure.values, places[rank], strict=True):
                found[item.name] = ValueEntry(_listed(item.path), values_file(rank), at, size_bytes)
        return found

    def metadata(self, values: Mapping[str, ValueEntry]) -> bytes:
        """The `.metadata` file of torch.distributed.checkpoint, for those who load with that. It is
        the same as before while values are as long as before.
        """
        if self._last is not None and self._last[0] == values:
            return self._last[1]
        described = dict(self._described)
        stored = dict(self._stored)
        for name, entry in values.items():
            described[name] = BytesStorageMetadata()
            stored[MetadataIndex(name)] = _StorageInfo(entry.file, entry.at, entry.size_bytes)
        paths = {name: _torch_path(path) for name, path in self._paths.items()}
        content = pickle.dumps(
            Metadata(state_dict_metadata=described, planner_data=paths, storage_data=stored)
        )
        self._last = (dict(values), content)
        return content

    def _add(self, structure: Structure) -> None:
        for item in (*structure.tensors, *structure.values):
            self._paths[item.name] = item.path
        for item, place in zip(structure.tensors, structure.layout.places, strict=True):
            entry = self.tensors.setdefault(
                item.name, TensorEntry(_listed(item.path), item.dtype, list(item.shape), [])
            )
            entry.shards.append(
                Shard(list(item.offsets), list(item.sizes), place.file, place.data_at)
            )
            described = self._described.setdefault(
                item.name,
                TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, item.dtype)), torch.Size(item.shape), []
                ),
            )
            index = MetadataIndex(item.name, item.offsets, len(described.chunks))
            described.chunks.append(
                ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes))
            )
            self._stored[index] = _StorageInfo(place.file, place.stream_at, place.stream_bytes)


class Exchange:
    """One rank's part in it. Rank 0 coordinates.

    Args:
        ledger: of its own; call i of it is the exchange of save i.
        timeout_s: how long a rank waits for the others.
    """

    def __init__(self, ledger: CallLedger, timeout_s: float) -> None:
        self._ledger = ledger
        self._timeout = timeout_s
        self._catalog = Catalog({})
        self._told = -1  # the last exchange in which the main thread has said its part
        self._passed = -1  # the last exchange that rank 0 has been through
        self._moved = threading.Condition()

    def changed(self, index: int, items: Sequence[Item]) -> tuple[Structure, Catalog | None]:
        """This rank has these parts now. Waits for all ranks.

        Returns:
            What it saves; on rank 0 the catalog too.

        Raises:
            CheckpointError: if the ranks' parts do not fit together, or a rank does not come.
        """
        ledger = self._ledger
        if ledger.world_size == 1:
            keys = share_out({0: items})[0]
            structure = Structure(items, keys, 0)
            self._catalog = Catalog({0: structure})
            return structure, self._catalog
        self._told = index
        try:
            ledger.finish(index, encode_items(items))
            catalog = self._coordinate(index, self._timeout) if ledger.rank == 0 else None
            answer = json.loads(ledger.await_conclusion(index, self._timeout))
        except KeyTimeout as e:
            raise CheckpointError(
                f"rank {ledger.rank} has a state dict of new structure to save, and waits for the "
                f"other ranks to save too; not all came within {self._timeout:g} s"
            ) from e
        ledger.forget(index)
        if "error" in answer:
            raise CheckpointError(answer["error"])
        sign, numbers = answer[str(ledger.rank)]
        chosen = set(numbers)
        keys = [item.key for i, item in enumerate(items) if (i in chosen) == (sign == "+")]
        return Structure(items, keys, ledger.rank), catalog

    @property
    def alone(self) -> Catalog | None:
        """The catalog, where there is one rank: what the thread that saves has made last. To be
        taken with the snapshot: by the time another thread looks, the next save may have changed
        it, and a checkpoint would be described by what another one holds.
        """
        return self._catalog if self._ledger.world_size == 1 else None

    def unchanged(self, index: int) -> Catalog | None:
        """This rank has the parts it had; to be called for every save, in order. Waits on rank 0 of
        several only, which gets the catalog of this save.
        """
        ledger = self._ledger
        if ledger.world_size == 1:
            return None
        ledger.finish(index)
        try:
            catalog = self._coordinate(index, self._timeout) if ledger.rank == 0 else None
        except KeyTimeout as e:
            raise CheckpointError(
                f"not all ranks came to this save within {self._timeout:g} s"
            ) from e
        ledger.forget(index)
        return catalog

    def refuse(self, index: int, cause: str) -> None:
        """This rank has no parts to tell for this save: what it was to save cannot be saved. Does
        nothing if it has told them.
        """
        ledger = self._ledger
        if ledger.world_size == 1 or index <= self._told:
            return
        self._told = index
        ledger.fail(index, CallFailure.here(index, "exchange", ledger.rank, cause))
        if ledger.rank == 0:
            ledger.conclude(index, json.dumps({"error": f"rank 0: {cause}"}).encode())
            self._pass(index, self._timeout)
        ledger.forget(index)

    def _pass(self, index: int, timeout: float | None) -> None:
        with self._moved:  # earlier ones may still be with the other thread
            self._moved.wait_for(lambda: self._passed >= index - 1, timeout)
            self._passed = index
            self._moved.notify_all()

    def _coordinate(self, index: int, timeout: float | None) -> Catalog:
        with self._moved:  # earlier ones may still be with the other thread
            self._moved.wait_for(lambda: self._passed >= index - 1, timeout)
        ledger = self._ledger
        try:
            failure = ledger.await_verdict(index, timeout).failure
            if failure is not None:
                cause = f"rank {failure.rank} on {failure.host}: {failure.cause}"
                ledger.conclude(index, json.dumps({"error": cause}).encode())
                return self._catalog
            new = {
                rank: decode_items(part) for rank, part in enumerate(ledger.parts(index)) if part
            }
            if new:
                self._renew(index, new)
            return self._catalog
        finally:
            with self._moved:
                self._passed = index
                self._moved.notify_all()

    def _renew(self, index: int, new: dict[int, list[Item]]) -> None:
        old = self._catalog.structures
        kept = {rank: s for rank, s in old.items() if rank not in new}
        plans = {**{rank: s.items for rank, s in kept.items()}, **new}
        fixed = {rank: [i.key for i in (*s.tensors, *s.values)] for rank, s in kept.items()}
        try:
            keys = share_out(dict(sorted(plans.items())), fixed)
        except CheckpointError as e:
            self._ledger.conclude(index, json.dumps({"error": str(e)}).encode())
            return
        structures = {
            rank: kept[rank] if rank in kept else Structure(plans[rank], keys[rank], rank)
            for rank in sorted(plans)
        }
        self._catalog = Catalog(structures)
        answer = {str(rank): _shortest(items, keys[rank]) for rank, items in new.items()}
        self._ledger.conclude(index, json.dumps(answer, separators=(",", ":")).encode())


def _shortest(items: Sequence[Item], keys: Sequence[Key]) -> tuple[str, list[int]]:
    """The numbers of the items that a rank saves, or of those that it does not."""
    mine = set(keys)
    taken = [i for i, item in enumerate(items) if item.key in mine]
    left = [i for i, item in enumerate(items) if item.key not in mine]
    return ("+", taken) if len(taken) <= len(left) else ("-", left)


def _listed(path: tuple[Any, ...]) -> list[Any]:
    return [list(key) if isinstance(key, tuple) else key for key in path]


def _torch_path(path: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(key[0] if isinstance(key, tuple) else str(key) for key in path)
