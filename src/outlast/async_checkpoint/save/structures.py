"""Which rank saves what: known as long as no structure changes, else agreed with the other ranks.

A rank compares the signature of its state dict with that of the last save. If it is equal, the rank
saves the same share as before, and tells nobody until it is done. Otherwise all ranks agree, in the
round of the save (`round.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from outlast.async_checkpoint.save.catalog import Catalog
from outlast.async_checkpoint.save.round import SaveRound
from outlast.async_checkpoint.snapshot.structure import Structure
from outlast.async_checkpoint.state_dict.last_value import Last
from outlast.async_checkpoint.state_dict.sharding import (
    Item,
    Key,
    decode_items,
    describe,
    encode_items,
    share_out,
)
from outlast.async_checkpoint.state_dict.tree import signature_and_leaves


class StructureMemo:
    """Remembers what was derived from the structure of the last state dict.

    torch takes ten milliseconds to list the parts of 400 tensors, and the structure of a state dict
    seldom changes. A `StructureMemo` lives as long as the process works in one folder: a restart in
    place keeps the structure. But the process may have another rank now, and the shard of a DTensor
    that it holds depends on its place in the mesh, which may differ between equal meshes. So the
    ranks of the process are part of the key.
    """

    def __init__(self) -> None:
        self._ranks: tuple[int, ...] = ()
        self._items: Last[list[Item]] = Last()
        self._structure: Last[Structure] = Last()
        self._plans: Last[dict[int, list[Item]]] = Last()
        self._shared: Last[tuple[dict[int, list[Key]], Catalog]] = Last()

    def move(self, *ranks: int) -> None:
        """Sets the ranks of this process from now on."""
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
        """Divides plans among ranks that have had no share before. See `share_out`."""

        def make() -> tuple[dict[int, list[Key]], Catalog]:
            keys = share_out(plans)
            return keys, Catalog({r: Structure(plans[r], keys[r], r) for r in plans})

        return self._shared.of(dict(plans), make)


class Structures:
    """The structure of this rank's last state dict; on rank 0, the catalog of all ranks' shares.

    One thread uses the catalog at a time: that of a save, or the training thread once all saves
    before have ended.
    """

    def __init__(self, memo: StructureMemo, rank: int, world_size: int) -> None:
        self.catalog = Catalog({})
        self._memo = memo
        self._rank, self._alone = rank, world_size == 1
        self._signature: list[Any] = []
        self._structure: Structure | None = None

    def known(self, signature: list[Any]) -> Structure | None:
        """What this rank saves of a state dict with this signature; `None` if it is new."""
        return self._structure if signature == self._signature else None

    def agree(
        self,
        state_dict: Mapping[str, Any],
        signature: list[Any],
        ranks: SaveRound,
        timeout_s: float,
    ) -> Structure:
        """Agrees with all ranks on what this one saves of a state dict whose structure is new.

        Raises:
            ValueError, CheckpointError: see `describe`, `share_out` and `SaveRound.agree`.
        """
        items = self._memo.items(state_dict)
        if self._alone:
            self.catalog = self._memo.share({0: items})[1]
            structure = self.catalog.structures[0]
        else:
            # If this is interrupted, rank 0 may know of the new structure: then they agree again.
            self._structure = None
            answer = ranks.agree(encode_items(items), timeout_s)
            sign, numbers = answer[str(self._rank)]
            chosen = set(numbers)
            keys = [item.key for i, item in enumerate(items) if (i in chosen) == (sign == "+")]
            structure = self._memo.structure(items, keys, self._rank)
        structure.number(state_dict)
        self._signature, self._structure = signature, structure
        return structure

    def divide(self, parts: Sequence[bytes]) -> dict[str, Any]:
        """Divides again, on rank 0: `parts` of ranks with a new structure are not empty. Returns
        the answer for these; the others keep their shares.

        Raises:
            CheckpointError: see `share_out`.
        """
        new = self._memo.plans(parts)
        old = self.catalog.structures
        kept = {rank: s for rank, s in old.items() if rank not in new}
        if kept:
            plans = dict(sorted({**{rank: s.items for rank, s in kept.items()}, **new}.items()))
            fixed = {rank: [i.key for i in (*s.tensors, *s.values)] for rank, s in kept.items()}
            keys = share_out(plans, fixed)
            self.catalog = Catalog(
                {
                    rank: kept[rank] if rank in kept else Structure(plans[rank], keys[rank], rank)
                    for rank in plans
                }
            )
        else:
            keys, self.catalog = self._memo.share(new)
        return {str(rank): _encode_share(items, keys[rank]) for rank, items in new.items()}


def _encode_share(items: Sequence[Item], keys: Sequence[Key]) -> tuple[str, list[int]]:
    """The indexes of the items that a rank saves (+) or does not save (-): the shorter list."""
    mine = set(keys)
    taken = [i for i, item in enumerate(items) if item.key in mine]
    left = [i for i, item in enumerate(items) if item.key not in mine]
    return ("+", taken) if len(taken) <= len(left) else ("-", left)
