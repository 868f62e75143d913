"""Remembers what was derived from the structure of the last state dict.

torch takes ten milliseconds to list the parts of 400 tensors, and the structure of a state dict
seldom changes. Everything derived from it is kept by one rule (`Last`): a value belongs to its
whole key, and another key replaces it.

A `StructureMemo` lives as long as the process works in one folder: a training that is restarted in
place has the same structure again. But it may have come back as another rank, and the shard of a
DTensor that a process holds depends on its place in the mesh, which an equal mesh need not share.
So the ranks of the process are part of the key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from outlast.async_checkpoint.save.catalog import Catalog
from outlast.async_checkpoint.snapshot.structure import Structure
from outlast.async_checkpoint.state_dict.last import Last
from outlast.async_checkpoint.state_dict.sharding import (
    Item,
    Key,
    decode_items,
    describe,
    share_out,
)
from outlast.async_checkpoint.state_dict.tree import signature_and_leaves


class StructureMemo:
    """The structures that one process remembers."""

    def __init__(self) -> None:
        self._ranks: tuple[int, ...] = ()
        self._items: Last[list[Item]] = Last()
        self._structure: Last[Structure] = Last()
        self._plans: Last[dict[int, list[Item]]] = Last()
        self._shared: Last[tuple[dict[int, list[Key]], Catalog]] = Last()

    def move(self, *ranks: int) -> None:
        """The ranks of this process are these from now on."""
        self._ranks = ranks

    def items(self, state_dict: Mapping[str, Any]) -> list[Item]:
        """The parts of `state_dict` that this rank has. See `describe`."""
        key = self._ranks, signature_and_leaves(state_dict)[0]
        return list(self._items.of(key, lambda: describe(state_dict)))

    def structure(self, items: Sequence[Item], keys: Collection[Key], rank: int) -> Structure:
        """The structure of a rank that has `items` and saves those of `keys`."""
        key = list(items), set(keys), rank
        return self._structure.of(key, lambda: Structure(items, keys, rank))

    def plans(self, parts: Sequence[bytes]) -> dict[int, list[Item]]:
        """The decoded plans of the ranks that have sent one."""
        return self._plans.of(
            list(parts),
            lambda: {rank: decode_items(part) for rank, part in enumerate(parts) if part},
        )

    def share(self, plans: Mapping[int, Sequence[Item]]) -> tuple[dict[int, list[Key]], Catalog]:
        """Divides plans among ranks of which none has had a share before. See `share_out`."""

        def make() -> tuple[dict[int, list[Key]], Catalog]:
            keys = share_out(plans)
            return keys, Catalog({r: Structure(plans[r], keys[r], r) for r in plans})

        return self._shared.of(dict(plans), make)
