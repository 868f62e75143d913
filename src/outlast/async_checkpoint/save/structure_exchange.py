"""Agrees which rank saves what, and keeps the result: the catalog of what a checkpoint holds.

A rank whose state dict has a new structure tells its parts and waits for the answer; one whose
structure is as before says so from a background thread, and does not wait. Rank 0 hears all ranks
at every save. If some have changed, it shares their parts out again, while ranks that have not
changed keep what they had: they are saving it already.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence

from outlast.async_checkpoint.snapshot.structure import Structure
from outlast.async_checkpoint.state_dict.catalog import Catalog
from outlast.async_checkpoint.state_dict.sharding import (
    Item,
    Key,
    decode_items,
    encode_items,
    share_out,
)
from outlast.coordination import KeyTimeout
from outlast.coordination.call_failure import CallFailure
from outlast.coordination.call_ledger import CallLedger
from outlast.errors import CheckpointError

__all__ = ["Agreed", "StructureExchange"]


@dataclasses.dataclass
class Agreed:
    """What the last exchange of this process has come to. A training that is restarted in place
    asks for the same again, and gets it at once: the same plans are shared out in the same way.

    Attributes:
        structure: what this rank saves.
        told: what each rank has told, as it was told and decoded.
        shared: the plans of all ranks, and on rank 0 what each saves of its own; the catalog.
    """

    structure: Structure | None = None
    told: tuple[list[bytes], dict[int, list[Item]]] | None = None
    shared: tuple[Mapping[int, Sequence[Item]], dict[int, list[Key]], Catalog] | None = None

    def structure_of(self, items: Sequence[Item], keys: Sequence[Key], rank: int) -> Structure:
        """The structure of a rank that has `items` and saves those of `keys`."""
        known = self.structure
        if known is None or not known.is_of(items, keys, rank):
            self.structure = known = Structure(items, keys, rank)
        return known

    def decoded(self, told: list[bytes]) -> dict[int, list[Item]]:
        """The plans of the ranks that have told one."""
        known = self.told
        if known is None or known[0] != told:
            plans = {rank: decode_items(part) for rank, part in enumerate(told) if part}
            self.told = known = (told, plans)
        return known[1]

    def share(self, plans: Mapping[int, Sequence[Item]]) -> tuple[dict[int, list[Key]], Catalog]:
        """Shares plans out among ranks of which none has had one before. See `share_out`."""
        known = self.shared
        if known is None or known[0] != plans:
            keys = share_out(plans)
            structures = {rank: Structure(plans[rank], keys[rank], rank) for rank in plans}
            self.shared = known = (plans, keys, Catalog(structures))
        return known[1], known[2]


class StructureExchange:
    """One rank's part in it. Rank 0 coordinates.

    Args:
        ledger: of its own; call i of it is the exchange of save i.
        timeout_s: how long a rank waits for the others.
        agreed: what this process remembers; nothing at first.
    """

    def __init__(self, ledger: CallLedger, timeout_s: float, agreed: Agreed) -> None:
        self._ledger = ledger
        self._agreed = agreed
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
            self._catalog = self._agreed.share({0: items})[1]
            return self._catalog.structures[0], self._catalog
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
        return self._agreed.structure_of(items, keys, ledger.rank), catalog

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
            new = self._agreed.decoded(ledger.parts(index))
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
        plans = dict(sorted({**{rank: s.items for rank, s in kept.items()}, **new}.items()))
        try:
            if kept:
                fixed = {rank: [i.key for i in (*s.tensors, *s.values)] for rank, s in kept.items()}
                keys = share_out(plans, fixed)
                structures = {
                    rank: kept[rank] if rank in kept else Structure(plans[rank], keys[rank], rank)
                    for rank in plans
                }
                self._catalog = Catalog(structures)
            else:
                keys, self._catalog = self._agreed.share(plans)
        except CheckpointError as e:
            self._ledger.conclude(index, json.dumps({"error": str(e)}).encode())
            return
        answer = {str(rank): _shortest(items, keys[rank]) for rank, items in new.items()}
        self._ledger.conclude(index, json.dumps(answer, separators=(",", ":")).encode())


def _shortest(items: Sequence[Item], keys: Sequence[Key]) -> tuple[str, list[int]]:
    """The numbers of the items that a rank saves, or of those that it does not."""
    mine = set(keys)
    taken = [i for i, item in enumerate(items) if item.key in mine]
    left = [i for i, item in enumerate(items) if item.key not in mine]
    return ("+", taken) if len(taken) <= len(left) else ("-", left)
