"""Which rank saves what: known as long as no structure changes, else agreed with the other ranks;
and the contents of a checkpoint that follow from it.

A rank compares the signature of its state dict with that of the last save. If it is equal, the rank
saves the same share as before, and tells no other rank until it is done. Otherwise all ranks agree,
in the round of the save (`round.py`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
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

from outlast.async_checkpoint.save.round import SaveRound
from outlast.async_checkpoint.snapshot.plan import (
    Item,
    Key,
    Plan,
    decode_items,
    describe,
    encode_plan,
    share_out,
)
from outlast.async_checkpoint.snapshot.structure import Structure, values_file
from outlast.async_checkpoint.state_dict import Last, signature_and_leaves, torch_path
from outlast.async_checkpoint.storage.entries import (
    Container,
    FileEntry,
    TensorEntry,
    ValueEntry,
)
from outlast.async_checkpoint.storage.manifest import CHUNK_BYTES, Manifest, checksum, pieces
from outlast.errors import CheckpointError
from outlast.system.main_program import without_collections

METADATA = ".metadata"


class Catalog:
    """The contents of a checkpoint across all ranks, and where they are. It never changes."""

    def __init__(self, structures: Mapping[int, Structure]) -> None:
        self.structures = dict(structures)
        self.is_readable = False  # a reader's check has accepted a manifest of it
        self.tensors: dict[str, TensorEntry] = {}
        self._containers: dict[str, Container] = {}
        self._metadata: Last[bytes] = Last()
        for structure in self.structures.values():
            for name, entry in structure.entries.items():
                if (known := self.tensors.setdefault(name, entry)) is not entry:
                    shards = [*known.shards, *entry.shards]
                    self.tensors[name] = msgspec.structs.replace(known, shards=shards)
        saved = {n for s in self.structures.values() for n, _ in s.value_entries}
        for structure in self.structures.values():
            for name, each in structure.containers.items():
                if name not in saved and name not in self.tensors:  # of another rank: no dict
                    self._containers.setdefault(name, each)

    def manifest(
        self, records: Sequence[bytes], step: int, save_id: str, metric: float | None
    ) -> tuple[Manifest, bytes]:
        """The manifest, and the content of `METADATA`; `records` are those of `Save.write`."""
        files: dict[str, FileEntry] = {}
        values: dict[str, ValueEntry] = {}
        judged: list[list[str]] = []
        for rank, record in enumerate(map(json.loads, records)):
            structure = self.structures[rank]
            if record["step"] != step:
                raise CheckpointError(f"rank {rank} has saved step {record['step']}, not {step}")
            if record["id"] != save_id:
                raise CheckpointError(f"rank {rank} wrote into another folder: {record['id']}")
            if record["structure"] != structure.digest:
                raise CheckpointError(f"rank {rank} has saved another structure than was agreed")
            sizes = {name: entry["size_bytes"] for name, entry in record["files"].items()}
            sizes.pop(values_file(rank), None)
            if sizes != {name: size for name, _, size in structure.files}:
                raise CheckpointError(f"rank {rank} has written other files than agreed: {sizes}")
            placed = zip(structure.value_entries, record["places"], strict=True)
            for (name, entry), (at, size) in placed:
                values[name] = msgspec.structs.replace(entry, at=at, size_bytes=size)
            if "non_finite" in record:
                judged.append(record["non_finite"])
            for name, entry in record["files"].items():
                files[name] = FileEntry(name, entry["size_bytes"], entry["checksums"])
        # It stays the same while the values have the same sizes.
        metadata = self._metadata.of(dict(values), lambda: self._pickle(values))
        checksums = [checksum(metadata[at : at + n]) for at, n in pieces(len(metadata))]
        files[METADATA] = FileEntry(METADATA, len(metadata), checksums)
        manifest = Manifest(
            step=step,
            save_id=save_id,
            world_size=len(records),
            metric=metric,
            chunk_bytes=CHUNK_BYTES,
            files=files,
            tensors=self.tensors,
            values=values,
            containers=self._containers,
            non_finite=sorted(set().union(*judged)) if judged else None,
        )
        return manifest, metadata

    def _pickle(self, values: Mapping[str, ValueEntry]) -> bytes:
        """The `.metadata` file of torch.distributed.checkpoint, for loading with plain PyTorch."""
        described, stored, paths = (dict(each) for each in self._torchs)
        for name, entry in values.items():
            described[name] = BytesStorageMetadata()
            stored[MetadataIndex(name)] = _StorageInfo(entry.file, entry.at, entry.size_bytes)
        return pickle.dumps(
            Metadata(state_dict_metadata=described, planner_data=paths, storage_data=stored)
        )

    @functools.cached_property
    def _torchs(self) -> tuple[dict[str, Any], dict[Any, _StorageInfo], dict[str, Any]]:
        """What torch wants to know of the tensors, where they are, and the paths of all."""
        described: dict[str, Any] = {}
        stored, paths = {}, {}
        # One object for all that are equal: it is pickled once.
        size, chunk_of = functools.cache(torch.Size), functools.cache(ChunkStorageMetadata)
        properties_of = functools.cache(lambda name: TensorProperties(dtype=getattr(torch, name)))
        for structure in self.structures.values():
            for item in (*structure.tensors, *structure.values):
                paths[item.name] = torch_path(item.path)
            placed = zip(structure.tensors, structure.extents, strict=True)
            entries = structure.entries
            for item, extent in sorted(placed, key=lambda each: entries[each[0].name].order):
                if (whole := described.get(item.name)) is None:
                    properties = properties_of(item.dtype)
                    whole = TensorStorageMetadata(properties, size(item.shape), [])
                    described[item.name] = whole
                index = MetadataIndex(item.name, item.offsets, len(whole.chunks))
                whole.chunks.append(chunk_of(size(item.offsets), size(item.sizes)))
                stored[index] = _StorageInfo(extent.file, extent.stream_at, extent.stream_bytes)
        return described, stored, paths


class StructureMemo:
    """Remembers what was derived from the structure of the last state dict.

    torch takes ten milliseconds to list the parts of 400 tensors, and the structure of a state dict
    seldom changes. A `StructureMemo` lives as long as the process works in one folder: a restart in
    place keeps the structure. But the process may have another rank now, and the shard of a DTensor
    that it holds depends on its place in the mesh, which may differ between equal meshes. So the
    `ranks` of the process are part of the key.
    """

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()
        self.sent: dict[bytes, list[Item]] = {}  # this rank's own plan
        self.goes_on = False  # the ranks go on with what they have agreed on: see `all_go_on`
        self._agreed: tuple[tuple[int, ...], Structures] | None = None
        self.structure: Last[Structure] = Last()
        self._items: Last[list[Item]] = Last()
        self._plans: Last[dict[int, Plan]] = Last()
        self._shared: Last[tuple[dict[int, list[Key]], Catalog]] = Last()

    def items(
        self, state_dict: Mapping[str, Any], signature: list[Any] | None = None
    ) -> list[Item]:
        """The parts of `state_dict`, which has this signature, that this rank has: `describe`."""
        key = self.ranks, signature or signature_and_leaves(state_dict)[0]
        return list(self._items.of(key, lambda: describe(state_dict)))

    def plans(self, parts: Sequence[bytes]) -> dict[int, Plan]:
        """The decoded plans of the ranks that have sent one, each line of them once."""

        def make() -> dict[int, Plan]:
            lines = {rank: part.split(b"\n") for rank, part in enumerate(parts) if part}
            found = dict(self.sent)
            for line in itertools.chain.from_iterable(lines.values()):
                if line not in found:
                    found[line] = decode_items(line)
            return {rank: [found[line] for line in each] for rank, each in lines.items()}

        return self._plans.of(list(parts), make)

    def share(self, plans: Mapping[int, Plan]) -> tuple[dict[int, list[Key]], Catalog]:
        """Divides plans among ranks that have had no share before. See `share_out`."""

        def make() -> tuple[dict[int, list[Key]], Catalog]:
            keys = share_out(plans)
            return keys, Catalog({r: Structure(_flat(plans[r]), keys[r], r) for r in plans})

        return self._shared.of(dict(plans), make)

    # A restart in place seldom changes what the ranks save. So before their first save, each says
    # what it saved last, and rank 0 whether that is what it has divided: one message of a round
    # that they take anyway. A rank whose state has changed since tells the others as in any save.

    def agreed(self, structures: Structures) -> None:
        """This rank knows its share in these structures."""
        self._agreed = self.ranks, structures

    @property
    def before(self) -> Structures | None:
        """The last structures that were agreed on, if the process has the same rank now."""
        found = self._agreed
        return found[1] if found is not None and found[0] == self.ranks else None

    def last_share(self) -> str:
        """The digest of what this rank saved last; empty if it has saved nothing."""
        before = self.before
        return "" if before is None or before.present is None else before.present.digest

    def all_go_on(self, shares: Sequence[str]) -> bool:
        """On rank 0: whether these `last_share`s of all ranks are what it has divided last."""
        divided = {} if self.before is None else self.before.catalog.structures
        return bool(divided) and shares == [s.digest for _, s in sorted(divided.items())]


class Structures:
    """The structure of this rank's last state dict; on rank 0, the catalog of all ranks' shares.

    One thread uses the catalog at a time: that of a save, or the training thread after all saves.
    """

    def __init__(self, memo: StructureMemo, rank: int, world_size: int) -> None:
        self.catalog = Catalog({})
        self._memo = memo
        self._rank, self._alone = rank, world_size == 1
        self._signature: list[Any] = []
        self.present: Structure | None = None

    def known(self, signature: list[Any]) -> Structure | None:
        """What this rank saves of a state dict with this signature; `None` if it is new."""
        if signature != self._signature:
            return None
        self._signature = signature
        return self.present

    def go_on(self, present: Callable[[], Mapping[str, Any]]) -> bool:
        """Takes what the ranks have agreed on before a restart, if all of them do. The `present`
        state is asked for only if the one before has meshes: those of process groups that are gone.
        """
        before = self._memo.before if self._memo.goes_on else None
        if before is None:
            return False
        self.catalog, self.present = before.catalog, before.present
        self._signature = before._signature
        self._memo.agreed(self)
        if not any(type(each) is tuple and len(each) == 4 for each in self._signature):
            return True
        with contextlib.suppress(CheckpointError, ValueError):  # the first save raises the same
            signature = signature_and_leaves(state_dict := present())[0]
            if self.known(signature) is not None:
                self._memo.items(state_dict, signature)  # the newer key there, too: see `Last.of`
        return True

    def agree(
        self, state_dict: Mapping[str, Any], signature: list[Any], ranks: SaveRound
    ) -> Structure:
        """Agrees with all ranks on what this one saves of a state dict whose structure is new."""
        items = self._memo.items(state_dict, signature)
        if self._alone:
            self.catalog = self._memo.share({0: [items]})[1]
            structure = self.catalog.structures[0]
        else:
            # If this is interrupted, rank 0 may know of the new structure: then they agree again.
            self.present = None
            self._memo.sent = without_collections(lambda: encode_plan(items))
            answer = ranks.agree(b"\n".join(self._memo.sent))
            structure = self._own(items, *answer[str(self._rank)])
        without_collections(lambda: structure.number(state_dict))
        self._signature, self.present = signature, structure
        self._memo.agreed(self)
        return structure

    def _own(self, items: list[Item], sign: str, numbers: Sequence[int]) -> Structure:
        if self._rank == 0:
            return self.catalog.structures[0]
        chosen = set(numbers)
        keys = [item.key for i, item in enumerate(items) if (i in chosen) == (sign == "+")]
        make = functools.partial(Structure, items, keys, self._rank)
        return self._memo.structure.of((items, keys, self._rank), make)

    def divide(self, parts: Sequence[bytes]) -> dict[str, Any]:
        """Divides again, on rank 0: returns the answer for ranks with new, nonempty `parts`."""
        new = self._memo.plans(parts)
        old = self.catalog.structures
        kept = {rank: s for rank, s in old.items() if rank not in new}
        if kept:
            plans = dict(sorted({**{rank: [s.items] for rank, s in kept.items()}, **new}.items()))
            fixed = {rank: [i.key for i in (*s.tensors, *s.values)] for rank, s in kept.items()}
            keys = share_out(plans, fixed)
            self.catalog = Catalog(
                {
                    rank: kept[rank] if rank in kept else Structure(_flat(plan), keys[rank], rank)
                    for rank, plan in plans.items()
                }
            )
        else:
            keys, self.catalog = self._memo.share(new)
        return without_collections(
            lambda: {str(r): _encode_share(_flat(plan), keys[r]) for r, plan in new.items()}
        )


def _flat(plan: Plan) -> list[Item]:
    return [item for items in plan for item in items]


def _encode_share(items: Sequence[Item], keys: Sequence[Key]) -> tuple[str, list[int]]:
    """The indexes of the items that a rank saves (+) or does not save (-): the shorter list."""
    mine = set(keys)
    parts: tuple[list[int], list[int]] = [], []
    for i, item in enumerate(items):
        parts[bool(mine) and (item.name, item.offsets) in mine].append(i)
    left, taken = parts
    return ("+", taken) if len(taken) <= len(left) else ("-", left)
