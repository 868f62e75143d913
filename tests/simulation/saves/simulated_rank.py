"""A rank that saves, as threads for the explorer: the real round and the real `Save`, with a store
in the place of the writer and of the storage.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from outlast.async_checkpoint.beside import Beside
from outlast.async_checkpoint.save.round import ABORTED, SaveRound
from outlast.async_checkpoint.save.save import Save
from outlast.coordination.call_ledger import DIFFERENT_ORDER, CallLedger
from outlast.errors import CheckpointError
from simulation.saves.explorer import Thread

LEDGER = "p"
LIMIT_S = 60.0
KINDS = ("same", "new", "cannot", "new, cannot", "fails")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of `Checkpointer.save`; `kind` is one of `KINDS`: whether the structure is new,
    whether it cannot be saved (before the ranks agree on it, or after), whether the write fails.
    `prepare`: a restore prepares the saves instead. `indivisible`: rank 0 cannot divide the parts.
    """

    step: int
    kind: str = "same"
    indivisible: bool = False

    @property
    def name(self) -> str:
        return "preparation of saves" if self.kind == "prepare" else f"save of step {self.step}"


class SimulatedWait:
    """In the place of `ThreadedWait`: the thread of rank 0 that listens is one of the explorer."""

    def __init__(self, wait: Any, name: str) -> None:
        ranks: SaveRound = wait.__self__
        self._store, self._number = ranks._save._store, ranks._index
        self._store.put(started(self._number), b"yes")

    def result(self) -> None:
        self._store.wait_for(f"ended/{self._number}", None)


def started(number: int) -> str:
    return f"started/{number}"


def committed(number: int) -> str:
    return f"committed/{number}"


def file(number: int, step: int, rank: int) -> str:
    """The key for this rank's files in the folder of a save."""
    return f"file/{number}/{step}/{rank}"


class _Catalog:
    """The structures that were agreed, by rank, as rank 0 knows them."""

    def __init__(self, store: Any, number: int, call: Call) -> None:
        self._store, self._number, self._call = store, number, call

    def divide(self, parts: Sequence[bytes]) -> dict[str, Any]:
        if self._call.indivisible:
            raise CheckpointError("shapes differ")
        agreed = self.agreed()
        new = {str(rank): self._number + 1 for rank, part in enumerate(parts) if part}
        self._store.put("catalog", json.dumps({**agreed, **new}).encode())
        return new

    def agreed(self) -> dict[str, int]:
        return dict(json.loads(self._store.read("catalog") or b"{}"))


class SimulatedSave(Save):
    """The real save, with what it does to files replaced."""

    def __init__(self, store: Any, ledger: CallLedger, number: int, call: Call) -> None:
        self.catalog = _Catalog(store, number, call)
        session: Any = SimpleNamespace(
            copies=None,
            storage=SimpleNamespace(names_for=lambda step, save_id: ("", "")),
            memo=SimpleNamespace(ranks=(ledger.rank, ledger.rank, ledger.world_size)),
        )
        structures: Any = self.catalog
        snapshotter: Any = None
        super().__init__(
            session,
            structures,
            snapshotter,
            threading.Event(),
            _round(store, ledger.rank, ledger.world_size, number, call),
            id=f"job{number}",
            index=number,
            step=call.step,
            metric=None,
            finite=(),
            place="",
            began=0.0,
        )
        self._store, self._call = store, call
        self.version = 0  # of this rank's structure

    def snapshot(
        self, state_dict: Mapping[str, Any], beside: Beside, earlier: Sequence[Save]
    ) -> None:
        """As `Structures.agree`: the version of a structure is the number of its save."""
        self.version = state_dict["version"]
        if self._call.kind == "cannot":
            raise CheckpointError("it cannot be saved")
        if "new" in self._call.kind or self.version < 0:
            state_dict["version"] = -1  # type: ignore[index]
            self.version = self.round.agree(b"1")[str(self._rank)]
            state_dict["version"] = self.version  # type: ignore[index]
        if "cannot" in self._call.kind:
            raise CheckpointError("there is no free buffer")

    def write(self) -> str:
        if self._call.kind == "fails":
            raise CheckpointError("the disk is full")
        self._store.put(file(self.index, self.step, self._rank), b"yes")
        return json.dumps({"step": self.step, "version": self.version})

    def _publish(self) -> Any:
        records = list(map(json.loads, self.round.records()))
        agreed = self.catalog.agreed()
        if [record["version"] for record in records] != [
            agreed.get(str(rank), 0) for rank in range(len(records))
        ]:
            return None, {"error": "another structure than was agreed"}
        # Whether all files are there is checked in a job; here, that is left to the invariants.
        self._store.put(committed(self.index), str(self.step).encode())
        return SimpleNamespace(size_bytes=1), {"size_bytes": 1}

    def _remove_files(self) -> None:
        pass


def threads_of(rank: int, world_size: int, calls: Sequence[Call], aborts: bool) -> list[Thread]:
    """The threads of a rank that makes these calls, one after another."""

    def saves(store: Any) -> tuple[str, ...]:
        state: dict[str, Any] = {"version": 0}
        return tuple(
            _outcome(store, CallLedger(store, LEDGER, rank, world_size), number, call, state)
            for number, call in enumerate(calls)
        )

    threads = [Thread(f"rank {rank}", rank, saves)]
    for number, call in enumerate(calls):
        ranks = (rank, world_size, number, call)
        if rank == 0:

            def listen(store: Any, ranks: Any = ranks, number: int = number) -> None:
                store.wait_for(started(number), None)
                _round(store, *ranks)._listen()
                store.put(f"ended/{number}", b"yes")

            threads.append(Thread(f"listener {number}", rank, listen, started(number)))
        if aborts:

            def abort(store: Any, ranks: Any = ranks) -> bool:
                claimant = _round(store, *ranks)
                return claimant.fail(claimant.failure(ABORTED))

            threads.append(Thread(f"abort {number} of rank {rank}", rank, abort))
    return threads


def _round(store: Any, rank: int, world_size: int, number: int, call: Call) -> SaveRound:
    ledger, divide = CallLedger(store, LEDGER, rank, world_size), _Catalog(store, number, call)
    return SaveRound(ledger, number, call.name, divide.divide, LIMIT_S)


def _outcome(store: Any, ledger: CallLedger, number: int, call: Call, state: dict[str, Any]) -> str:
    """As `Saves.save` and `Saves.prepare`, and `Saves._complete`."""
    if call.kind == "prepare":
        agreement = _round(store, ledger.rank, ledger.world_size, number, call)
        state["version"] = -1
        try:
            state["version"] = agreement.agree(b"1")[str(ledger.rank)]
            agreement.forget()
        except CheckpointError as e:
            agreement.refuse(e)
            return str(e)
        return "done"
    save = SimulatedSave(store, ledger, number, call)
    try:
        save.snapshot(state, Beside(), ())
    except CheckpointError as e:
        save.refuse(e)
        return str(e)
    try:
        save.complete()
    except CheckpointError as e:
        return str(e)
    return "done"


def names_both(message: str, calls: Sequence[Call]) -> bool:
    """Whether it names two ranks that have called for different saves, and both saves."""
    return DIFFERENT_ORDER in message and any(
        f"{one.name!r} on rank {a}" in message and f"{other.name!r} on rank {b}" in message
        for a, one in enumerate(calls)
        for b, other in enumerate(calls)
        if one.name != other.name
    )
