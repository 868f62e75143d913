"""Restores from snapshots that are still in memory.

Each rank's memory holds the parts that the rank saves. With shards, it loads the same parts. Parts
that ranks share (under DDP, all of them) are divided among the ranks. If all ranks are on one host,
each reads the tensors that it lacks from the memory of the ranks that have them. Otherwise what a
rank lacks is broadcast: verified before it is sent, and again on arrival.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from outlast.async_checkpoint.restore.fit import (
    EXTRA,
    Content,
    blank_extra_states,
    empty_in,
    fill_empty,
)
from outlast.async_checkpoint.restore.verified_read import (
    Piece,
    Source,
    address_of,
    borrowed_source,
    memory_source,
    read_verified,
)
from outlast.async_checkpoint.snapshot.plan import Item
from outlast.async_checkpoint.state_dict import ANY_SIZE, look_up
from outlast.async_checkpoint.storage.entries import (
    ITEM_BYTES,
    Container,
    Contents,
    FileEntry,
    TensorEntry,
    ValueEntry,
    is_covered,
)
from outlast.async_checkpoint.storage.manifest import CHUNK_BYTES, checksum, pieces
from outlast.coordination.agreement import Agreement
from outlast.coordination.call_ledger import CallFailure
from outlast.coordination.collectives import device_of, global_rank
from outlast.errors import CheckpointError
from outlast.system.shared_memory import MemoryName, SharedMemory

log = logging.getLogger("outlast.checkpoint")

_SENT_BYTES = 64 << 20  # in one collective
_TOLD_BYTES = 1 << 20
"""So many bytes of values, of all ranks, are told at once, and not sent in a collective."""
_SENT = "sent"  # the name of what another rank has packed

ItemsOf = Callable[[dict[str, Any]], list[Item]]


class _Others(NamedTuple):
    """What this rank gets of the others: from these sources, and what has to be sent to it."""

    whole: Contents
    sources: list[Source]
    to_send: set[str]


class MemorySnapshot:
    """This rank's part of a snapshot that all ranks have, as described by its writer."""

    def __init__(self, snapshot: Mapping[str, Any], memory: SharedMemory, values: bytes) -> None:
        self._where = f"the snapshot of step {snapshot['step']} in memory"
        self._snapshot, self._memory, self._values = snapshot, memory, values
        self._items: list[Item] = []  # of the state dict

    @functools.cached_property
    def source(self) -> Source:
        view = self._memory.view
        views = {name: view[at : at + size] for name, at, size in self._snapshot["layout"]}
        if self._snapshot["values"]:
            views[self._snapshot["values"]] = memoryview(bytearray(self._values))
        return memory_source(self._where, _checked(lambda: _entries_of(self._snapshot)), views)

    def lacks(self, state_dict: dict[str, Any], items_of: ItemsOf) -> list[str] | None:
        """The names in the state dict of what this part lacks; `None` if all parts must be known
        whole: to fill empty dicts, extra states or tensors of any size, or to say what the state
        dict lacks.
        """
        own = self.source.contents  # also checks it, before other ranks wait for this one
        blank_extra_states(state_dict, own)
        items = self._items = items_of(state_dict)
        names = {item.name for item in items}
        if empty_in(state_dict) or not names >= {*own.tensors, *own.values}:
            return None
        lacking = set(_lacking(items, own, names))
        if lacking and any(EXTRA in name for name in names):
            return None
        tensors = [e for e in items if e.kind == "tensor" and e.name in lacking]
        if any(hasattr(look_up(state_dict, each.path), ANY_SIZE) for each in tensors):
            return None
        return sorted(lacking)

    def told(self, wanted: Collection[str] | None) -> dict[str, Any]:
        """What the others need to know of this part: all, or of what they want. With the values, if
        they are small.
        """
        own, told = self.source.contents, dict[str, Any]()
        if wanted is not None:
            tensors, values = (_only(each, set(wanted)) for each in (own.tensors, own.values))
            used = {each.file for tensor in tensors.values() for each in tensor.shards}
            used.update(value.file for value in values.values())
            own = Contents(_only(own.files, used), tensors, values)
        with contextlib.suppress(OSError):  # without its name, it is sent
            told["memory"] = dataclasses.astuple(self._memory.name)
        size_bytes = sum(value.size_bytes for value in own.values.values())
        if 0 < size_bytes <= _TOLD_BYTES // self._snapshot["world_size"]:
            content, description = self.pack(own.values)
            packed = base64.b64encode(content).decode()
            told["values"] = packed, msgspec.to_builtins(description)
        return {**told, "layout": self._snapshot["layout"], "contents": msgspec.to_builtins(own)}

    def index_for(
        self,
        state_dict: dict[str, Any],
        items_of: ItemsOf,
        descriptions: Sequence[Mapping[str, Any]],
        *,
        fills: bool,
    ) -> tuple[Contents, list[str], list[Contents]]:
        """The contents of this part and of what all ranks have `told`, the names that this rank
        loads but its part lacks, and what each rank has told. Fills empty dicts if it `fills`: with
        all that was saved, or there are none.
        """
        own = self.source.contents
        parts = [_checked(partial(each.__getitem__, "contents")) for each in descriptions]
        told = _merged(parts) if len(parts) > 1 else own
        tensors, values = {**own.tensors, **told.tensors}, {**own.values, **told.values}
        whole = Contents({}, tensors, values, told.containers)
        if fills:
            fill_empty(state_dict, whole)
            self._items = items_of(state_dict)
        return whole, _lacking(self._items, own, {*whole.tensors, *whole.values}), parts

    def others(
        self,
        state_dict: dict[str, Any],
        items_of: ItemsOf,
        descriptions: Sequence[Mapping[str, Any]],
        rank: int,
        *,
        fills: bool,
    ) -> _Others:
        """What this rank gets of the others, which have `told` this; see `index_for`."""
        whole, lacking, parts = self.index_for(state_dict, items_of, descriptions, fills=fills)
        sources, left = list[Source](), set(lacking)
        for owner, each in enumerate(descriptions):
            if owner == rank or "values" not in each:
                continue
            content, description = each["values"]
            told = _checked(partial(dict, description))
            if values := _only(told.values, left):
                where = f"{self._where} of rank {owner}"
                view = memoryview(bytearray(base64.b64decode(content)))
                sources.append(
                    memory_source(where, Contents(told.files, {}, values), {_SENT: view})
                )
                left -= values.keys()
        borrowed = self.borrow(descriptions, parts, left, rank)
        if borrowed is not None:
            sources += borrowed
            left -= whole.tensors.keys()
        return _Others(whole, sources, left)

    def borrow(
        self,
        descriptions: Sequence[Mapping[str, Any]],
        parts: Sequence[Contents],
        lacking: Collection[str],
        rank: int,
    ) -> list[Source] | None:
        """The sources of the tensors that this rank lacks, in the memory of other ranks, which have
        these descriptions and parts; `None` if they have to be sent.
        """
        found, lacked = [], set(lacking)
        for owner, (each, contents) in enumerate(zip(descriptions, parts, strict=True)):
            tensors = _only(contents.tensors, lacked)
            if owner == rank or not tensors:
                continue
            try:
                memory = MemoryName(*each["memory"])
                os.close(memory.open())
            except (KeyError, TypeError, OSError) as e:
                log.debug("the memory of rank %d is not read: %s", owner, e)
                return None
            where = f"{self._where} of rank {owner}"
            places = {name: (at, size) for name, at, size in each["layout"]}
            needed = Contents(contents.files, tensors, {})
            found.append(borrowed_source(where, needed, memory, places))
        return found

    def pack(self, names: Collection[str]) -> tuple[memoryview, Contents]:
        """What this rank has under these names, verified and contiguous; and its description."""
        own = self.source.contents
        size = 0
        wanted: list[tuple[str, int, int, int]] = []

        def packed(entry: Any, size_bytes: int) -> Any:
            nonlocal size
            wanted.append((entry.file, entry.at, size_bytes, size))
            size += size_bytes
            return msgspec.structs.replace(entry, file=_SENT, at=size - size_bytes)

        tensors, values = {}, {}
        for name, entry in _only(own.tensors, names).items():
            item_bytes = ITEM_BYTES[entry.dtype]
            shards = [packed(each, math.prod(each.sizes) * item_bytes) for each in entry.shards]
            tensors[name] = msgspec.structs.replace(entry, shards=shards)
        for name, value in _only(own.values, names).items():
            values[name] = packed(value, value.size_bytes)
        content = memoryview(bytearray(size))
        if size:
            base = address_of(content)
            read_verified(
                self.source, [Piece(file, at, n, base + to, content) for file, at, n, to in wanted]
            )
        sums = [checksum(content[at : at + n]) for at, n in pieces(size)]
        return content, Contents({_SENT: FileEntry(_SENT, size, sums)}, tensors, values)

    def receive_buffers(
        self, packed: memoryview, descriptions: Sequence[Any], rank: int
    ) -> list[tuple[Contents, memoryview]]:
        """What each rank has packed, and a buffer for it; for this rank, the packed part itself."""
        found = []
        for owner, each in enumerate(descriptions):
            contents = _checked(partial(dict, each))
            size = contents.files[_SENT].size_bytes
            found.append((contents, packed if owner == rank else memoryview(bytearray(size))))
        return found

    def exchange(
        self, parts: Sequence[tuple[Contents, memoryview]], lacking: Collection[str], group: Any
    ) -> list[Source]:
        """Broadcasts what each rank packed; returns the sources of what this one lacks."""
        found = []
        for owner, (contents, buffer) in enumerate(parts):
            if buffer:  # else there may be tensors without elements
                _send(torch.frombuffer(buffer, dtype=torch.uint8), owner, group)
            tensors, values = _only(contents.tensors, lacking), _only(contents.values, lacking)
            needed = Contents(contents.files, tensors, values)
            where = f"{self._where}, sent by rank {owner}"
            found.append(memory_source(where, needed, {_SENT: buffer}))
        return found


def content_in_memory(
    memory: MemorySnapshot,
    state_dict: dict[str, Any],
    items_of: ItemsOf,
    ranks: Agreement,
    group: Any,
) -> Content | CallFailure:
    """What a snapshot holds for this rank, or the failure of one, on all ranks. Fills empty dicts.

    What may fail on one rank alone comes before the exchange of its step, so that a rank out of
    memory, or with a damaged byte, does not leave the others waiting.
    """

    def all_lack(parts: list[Any]) -> Any:
        return None if None in parts else sorted({name for part in parts for name in part})

    lacks = ranks.attempt_and_gather(lambda: (None, memory.lacks(state_dict, items_of)), all_lack)
    if isinstance(lacks, CallFailure):
        return lacks
    if lacks[1] == []:
        return Content(memory.source.contents, [memory.source])

    told = ranks.attempt_and_gather(lambda: (None, memory.told(lacks[1])), list)
    if isinstance(told, CallFailure):
        return told

    def look() -> tuple[_Others, Any]:
        fills = lacks[1] is None
        others = memory.others(state_dict, items_of, told[1], ranks.rank, fills=fills)
        return others, sorted(others.to_send)

    found = ranks.attempt_and_gather(
        look, lambda parts: sorted({name for part in parts for name in part})
    )
    if isinstance(found, CallFailure):
        return found
    (whole, sources, to_send), wanted = found
    sources = [memory.source, *sources]
    if not wanted:
        return Content(whole, sources)

    def pack() -> tuple[memoryview, Any]:
        content, description = memory.pack(set(wanted))
        return content, msgspec.to_builtins(description)

    packed = ranks.attempt_and_gather(pack, list)
    if isinstance(packed, CallFailure):
        return packed
    parts = ranks.attempt(lambda: memory.receive_buffers(*packed, ranks.rank))
    if isinstance(parts, CallFailure):
        return parts
    return Content(whole, [*sources, *memory.exchange(parts, to_send, group)])


def _send(content: torch.Tensor, owner: int, group: Any) -> None:
    source, device = global_rank(group, owner), device_of(group)
    for piece in content.split(_SENT_BYTES):
        moved = piece.to(device)
        dist.broadcast(moved, source, group=group)
        if moved is not piece:
            piece.copy_(moved)


def _only(entries: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: entry for name, entry in entries.items() if name in names}


def _lacking(items: Sequence[Item], own: Contents, among: Collection[str]) -> list[str]:
    """The names of the items that `own` does not hold, as far as they are `among` these names."""
    parts = {
        (name, tuple(shard.offsets), tuple(shard.sizes))
        for name, entry in own.tensors.items()
        for shard in entry.shards
    }
    return sorted(
        {
            item.name
            for item in items
            if (item.name, item.offsets, item.sizes) not in parts
            and item.name not in own.values
            and item.name in among
        }
    )


def _entries_of(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of what a snapshot holds, in JSON."""
    index, file = json.loads(snapshot["index"]), snapshot["values"]
    places = zip(index["values"], snapshot["places"], strict=True)
    values = {
        name: {"path": path, "file": file, "at": at, "size_bytes": size, "order": order}
        for (name, path, order), (at, size) in places
    }
    files = {name: {"name": name, **each} for name, each in snapshot["files"].items()}
    return {**index, "files": files, "values": values}


def _checked(entries: Callable[[], Any]) -> Contents:
    """The contents of a rank's part, or a `CheckpointError` if what a process told is false."""
    try:
        contents = msgspec.convert(entries(), Contents)
        contents.check(CHUNK_BYTES, complete=False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"a snapshot in memory is not described correctly: {e!r}") from e
    return contents


def _merged(parts: Sequence[Contents]) -> Contents:
    tensors: dict[str, TensorEntry] = {}
    values: dict[str, ValueEntry] = {}
    containers: dict[str, Container] = {}
    for part in parts:
        values.update(part.values)
        containers = {**part.containers, **containers}
        for name, entry in part.tensors.items():
            known = tensors.setdefault(name, msgspec.structs.replace(entry, shards=[]))
            if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                raise CheckpointError(f"{name!r} differs between the snapshots of the ranks")
            known.shards.extend(entry.shards)
    for name, entry in tensors.items():
        if not is_covered(entry.shape, [(shard.offsets, shard.sizes) for shard in entry.shards]):
            raise CheckpointError(f"the snapshots of all ranks do not cover {name!r} exactly once")
    for name in containers.keys() & (tensors.keys() | values.keys()):
        del containers[name]  # of another rank, where it is no dict
    return Contents({}, tensors, values, containers)
