"""What a run has done, and whether a store in memory could have given the same results."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outlast.coordination.replicated import operations
from outlast.coordination.stores.etcd import layout
from simulation.etcd.model import EtcdModel, Keys


@dataclass
class Performed:
    """One operation of a client."""

    number: int  # in the order in which they began
    name: str
    key: str
    arguments: tuple[Any, ...]
    begun: int  # the revision before it
    ended: int = -1  # the revision after it; -1 while it runs, or if it failed
    result: Any = None
    writes: list[tuple[int, bool]] = field(default_factory=list)  # revision, took effect

    @property
    def reads(self) -> bool:
        """Whether it changes nothing, whatever it finds."""
        if self.name == "compare_set":
            return bool(self.arguments[0] == self.arguments[1])
        return self.name in ("read", "wait_for", "check", "keys")


class History:
    """The contents of etcd at every revision, and the checks of a run.

    Args:
        root: the prefix of the store.
        names: the keys that the run uses.
    """

    def __init__(self, root: bytes, names: Sequence[str]) -> None:
        self._root, self._names = root, names
        self._kept: dict[int, Keys] = {}

    def keep(self, model: EtcdModel) -> None:
        """Remembers the present contents: the model forgets what is compacted."""
        self._kept[model.revision] = model.keys

    def values(self, revision: int) -> dict[str, bytes | None]:
        """The values of all keys at a revision."""
        return {key: self.value(revision, key) for key in self._names}

    def value(self, revision: int, key: str) -> bytes | None:
        """The value of a key at a revision."""
        base, entries = layout.base_key(self._root, key), layout.entry_key(self._root, key)
        found = [
            layout.KeyValue(k, held.value, held.created, held.modified)
            for k, held in self._kept[revision].items()
            if k == base or k.startswith(entries)
        ]
        return layout.value_of(found)

    def check(self, operations: Iterable[Performed]) -> None:
        """Raises an `AssertionError` if the operations were not exactly once and linearizable."""
        order: list[tuple[int, Performed]] = []
        for operation in {id(each): each for each in operations}.values():
            taken = [revision for revision, took in operation.writes if took]
            if len(taken) > 1:
                raise AssertionError(f"performed {len(taken)} times: {operation}")
            order += [(revision, operation) for revision in taken]
            if operation.ended >= 0:
                self._check_ended(operation, taken)
        values: dict[str, bytes | None] = dict.fromkeys(self._names)
        order.sort(key=lambda each: (each[0], each[1].number))
        for revision, batch in itertools.groupby(order, lambda each: each[0]):
            before, performed = dict(values), [operation for _, operation in batch]
            for operation in performed:
                expected = perform(values, operation)
                if operation.ended >= 0 and operation.result != expected:
                    raise AssertionError(f"{operation} at {revision}: expected {expected!r}")
            if values != self.values(revision):
                raise AssertionError(
                    f"{performed} at {revision}: {before} became {self.values(revision)}, "
                    f"not {values}"
                )

    def _check_ended(self, operation: Performed, taken: list[int]) -> None:
        window = range(operation.begun, operation.ended + 1)
        if operation.reads:
            seen = [read(self.values(revision), operation) for revision in window]
            if operation.result not in seen:
                raise AssertionError(f"{operation}: not a value at the time: {seen}")
        elif operation.name == "compare_set" and not taken:
            expected = operation.arguments[0]
            seen_then = [self.value(revision, operation.key) for revision in window]
            if operation.result not in seen_then or (operation.result or b"") == expected:
                raise AssertionError(f"{operation}: refused without a reason: {seen_then}")
        elif len(taken) != 1 or taken[0] not in window:
            raise AssertionError(f"{operation}: performed at {taken}")


def perform(values: dict[str, bytes | None], operation: Performed) -> Any:
    """Performs a write on a table in memory; returns its result."""
    key, held = operation.key, values[operation.key]
    name, arguments = operation.name, operation.arguments
    if name == "claim":
        values[key] = arguments[0] if held is None else held
        return values[key]
    if name == "add":
        total = int(held or b"0") + int(arguments[0])
        values[key] = b"%d" % total
        return total
    if name == "append":
        values[key] = (held or b"") + arguments[0]
    elif name == "put":
        values[key] = arguments[0]
    elif name == "compare_set":
        if (held or b"") == arguments[0]:
            values[key] = arguments[1]
        return values[key]
    else:
        values[key] = None
        return held is not None if name == "delete" else None
    return None


def read(values: dict[str, bytes | None], operation: Performed) -> Any:
    """The result of a read of a table in memory."""
    held = values[operation.key]
    if operation.name == "check":
        return held is not None
    if operation.name == "keys":
        present = [key for key in sorted(values) if values[key] is not None]
        return operations.Keys(tuple(key for key in present if key.startswith(operation.key)))
    return held
