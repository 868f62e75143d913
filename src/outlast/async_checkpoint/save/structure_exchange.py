"""Agrees which rank saves what, and keeps the result: the catalog of what a checkpoint holds.

A rank whose state dict has a new structure sends its parts and waits for the answer. A rank whose
structure is unchanged says so on the thread of the saves, and does not wait. Rank 0 hears from all
ranks at every save. If some have a new structure, it divides their parts again; the other ranks
keep their shares, because they are saving them already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from outlast.async_checkpoint.save.catalog import Catalog
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
from outlast.coordination import KeyTimeout
from outlast.coordination.agreement import OF_ALL_RANKS
from outlast.coordination.call_ledger import CallFailure, CallLedger
from outlast.errors import CheckpointError, CheckpointTimeout, StoreError
from outlast.system.error_text import describe as describe_error


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


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The part of a state dict that this rank saves, and all leaves of the state dict, in order. If
    the structure was `new`, the ranks have already agreed on this save. On rank 0, the catalog of
    the checkpoint, if it is known already.
    """

    structure: Structure
    leaves: list[Any]
    new: bool
    catalog: Catalog | None


class StructureExchange:
    """Agrees on structures with the other ranks. Rank 0 coordinates. `ledger` is used for nothing
    else; its call i is the exchange of save i.
    """

    def __init__(self, ledger: CallLedger, timeout_s: float, memo: StructureMemo) -> None:
        self._ledger = ledger
        self._memo = memo
        self._timeout = timeout_s
        self._catalog = Catalog({})
        self._sent = -1  # the last exchange in which the training thread has sent its part
        self._passed = -1  # the last exchange that rank 0 has completed
        self._advanced = threading.Condition()
        self._signature: list[Any] = []
        self._structure: Structure | None = None

    def agree(self, index: int, state_dict: Mapping[str, Any]) -> Agreement:
        """Agrees with all ranks on who saves what, if the structure of `state_dict` is new here;
        otherwise `unchanged` follows, on another thread.

        Raises:
            ValueError, CheckpointError: see `describe` and `share_out`.
        """
        signature, leaves = signature_and_leaves(state_dict)
        if self._structure is not None and signature == self._signature:
            # The catalog is taken now: by the time another thread looks, the next save may have
            # changed it, and the checkpoint would be described by the catalog of another.
            alone = self._catalog if self._ledger.world_size == 1 else None
            return Agreement(self._structure, leaves, False, alone)
        self._structure, catalog = self._agree_again(index, self._memo.items(state_dict))
        self._structure.number(state_dict)
        self._signature = signature
        return Agreement(self._structure, leaves, True, catalog)

    def _agree_again(self, index: int, items: Sequence[Item]) -> tuple[Structure, Catalog | None]:
        """Sends the parts that this rank has now, and waits for all ranks. Returns what this rank
        saves; on rank 0 the catalog too.

        Raises:
            CheckpointError: if the ranks' parts do not fit together, or a rank does not save.
        """
        ledger = self._ledger
        if ledger.world_size == 1:
            self._catalog = self._memo.share({0: items})[1]
            return self._catalog.structures[0], self._catalog
        self._sent = index
        try:
            ledger.finish(index, encode_items(items))
            catalog = self._coordinate(index) if ledger.rank == 0 else None
            answer = json.loads(ledger.await_conclusion(index, self._timeout))
        except KeyTimeout as e:
            raise CheckpointTimeout(
                f"rank {ledger.rank} saves a state dict of new structure, and waited for the other "
                f"ranks to save too; not all did within {self._timeout:g} s"
            ) from e
        ledger.forget(index)
        if "error" in answer:
            raise CheckpointError(answer["error"])
        sign, numbers = answer[str(ledger.rank)]
        chosen = set(numbers)
        keys = [item.key for i, item in enumerate(items) if (i in chosen) == (sign == "+")]
        return self._memo.structure(items, keys, ledger.rank), catalog

    def unchanged(self, index: int) -> Catalog | None:
        """Reports that this rank has the same parts as before. Call it for every save whose
        structure was not new, in order. Only rank 0 of several waits, and gets the catalog.
        """
        ledger = self._ledger
        if ledger.world_size == 1:
            return None
        ledger.finish(index)
        try:
            catalog = self._coordinate(index) if ledger.rank == 0 else None
        except KeyTimeout as e:
            raise CheckpointTimeout(
                f"not all ranks began this save within {self._timeout:g} s"
            ) from e
        ledger.forget(index)
        return catalog

    def refuse(self, index: int, cause: str) -> None:
        """Reports that this rank cannot save its state; does nothing if it has sent its parts."""
        ledger = self._ledger
        if ledger.world_size == 1 or index <= self._sent:
            return
        self._sent = index
        ledger.fail(index, CallFailure.here(index, "exchange", ledger.rank, cause))
        if ledger.rank == 0:
            ledger.conclude(index, json.dumps({"error": f"rank 0: {cause}"}).encode())
            with self._turn(index):
                pass
        ledger.forget(index)

    @contextlib.contextmanager
    def _turn(self, index: int) -> Iterator[None]:
        with self._advanced:  # the other thread may still be at an earlier exchange
            if not self._advanced.wait_for(lambda: self._passed >= index - 1, self._timeout):
                raise CheckpointTimeout(
                    f"rank 0 waited {self._timeout:g} s for the save before this one, which "
                    "is still being written (the disk may not respond)"
                )
        try:
            yield
        finally:
            with self._advanced:
                self._passed = index
                self._advanced.notify_all()

    def _coordinate(self, index: int) -> Catalog:
        ledger = self._ledger
        answer: dict[str, Any] = {}
        try:
            with self._turn(index):
                failure = ledger.await_verdict(index, self._timeout).failure
                if failure is not None:
                    cause = f"rank {failure.rank} on {failure.host}: {failure.cause}"
                    answer = {"error": cause}
                elif new := self._memo.plans(ledger.parts(index)):
                    answer = self._renew(new)
            if answer:
                ledger.conclude(index, json.dumps(answer, separators=(",", ":")).encode())
        except BaseException as e:
            if not isinstance(e, OF_ALL_RANKS):  # the other ranks wait for the answer
                with contextlib.suppress(StoreError):
                    cause = (
                        f"rank 0: {str(e) if isinstance(e, CheckpointError) else describe_error(e)}"
                    )
                    ledger.conclude(index, json.dumps({"error": cause}).encode())
            raise
        return self._catalog

    def _renew(self, new: dict[int, list[Item]]) -> dict[str, Any]:
        """Divides the parts again; returns the answer for the ranks that have sent them."""
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
                keys, self._catalog = self._memo.share(plans)
        except CheckpointError as e:
            return {"error": str(e)}
        return {str(rank): _encode_share(items, keys[rank]) for rank, items in new.items()}


def _encode_share(items: Sequence[Item], keys: Sequence[Key]) -> tuple[str, list[int]]:
    """The indexes of the items that a rank saves (+) or does not save (-): the shorter list."""
    mine = set(keys)
    taken = [i for i, item in enumerate(items) if item.key in mine]
    left = [i for i, item in enumerate(items) if item.key not in mine]
    return ("+", taken) if len(taken) <= len(left) else ("-", left)
