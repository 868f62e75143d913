"""What the replicated store can do, and what it answers.

All messages and all that stands in the log are `msgspec` structs: its binary form of a value has
about the size of the value, and what a decoder returns has the declared types.
"""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import msgspec

from outlast.errors import StoreError

READS = frozenset({"read", "check", "keys"})
WRITES = frozenset({"put", "claim", "add", "append", "delete", "compare_set", "delete_prefix"})
WAIT = "wait_for"
BATCH = "batch"

MESSAGE_BYTES = 4 << 20
"""A message with operations, results or entries of the log holds no more when it is as long as
this. One operation is shorter than 32 MiB (see `launch.hosts.server`), so no message is too long
for its receiver.
"""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The result of an operation that was given up; it may have been performed all the same."""

    reason: str


class Keys(msgspec.Struct, frozen=True, tag=True):
    """The result of `keys`."""

    names: tuple[str, ...]


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """One operation.

    Its result depends on `name`:

    * `put`, `append`: `None`. `delete`, `delete_prefix`: the number of keys that were removed.
    * `claim`: sets the key if it is absent; the value afterwards.
    * `read`: the value, or `None`. `check`: 1 if the key exists, else 0.
    * `wait_for`: the value, as soon as there is one.
    * `add`: the number under the key (0 if absent) plus `amount`.
    * `compare_set`: sets the key to `value` if its value is `expected` (`b""`: or if it is absent);
      the value afterwards, or `None`.
    * `keys`: the sorted keys that start with `key`, as `Keys`.
    * `batch`: performs `operations` as one, without any other in between; the list of their
      results. It holds no waits and no batches.
    """

    name: str
    key: str = ""
    value: bytes = b""
    amount: int = 0
    expected: bytes = b""
    operations: tuple[Operation, ...] = ()

    def __post_init__(self) -> None:
        if self.name == BATCH:
            for part in self.operations:
                if part.name in (BATCH, WAIT):
                    raise ValueError(f"a batch of operations cannot hold a {part.name!r}")
        elif self.name not in READS and self.name not in WRITES and self.name != WAIT:
            raise ValueError(f"unknown store operation {self.name!r}")

    @property
    def writes(self) -> bool:
        """Whether the operation may change the table."""
        if self.name == BATCH:
            return any(part.name in WRITES for part in self.operations)
        return self.name in WRITES


def size_bytes(value: object) -> int:
    """About how long an operation or a result is in a message."""
    if isinstance(value, bytes | str):
        return len(value) + 8
    if isinstance(value, Operation):
        parts = sum(map(size_bytes, value.operations))
        return len(value.key) + len(value.value) + len(value.expected) + parts + 16
    if isinstance(value, Keys):
        return sum(map(size_bytes, value.names))
    return sum(map(size_bytes, value)) if isinstance(value, list | tuple) else 16


Single: TypeAlias = bytes | int | Keys | Failed | None
Result: TypeAlias = Single | list[Single]


class OperationStore:
    """The methods of a `Store`, and a few more, each one `Operation` that `perform` performs."""

    def perform(self, operation: Operation, timeout: float | None = None) -> Result:
        """The result; a `KeyTimeout` of a wait; a `StoreError`, maybe after it was performed."""
        raise NotImplementedError

    def put(self, key: str, value: bytes) -> None:
        self.perform(Operation("put", key, value))

    def claim(self, key: str, value: bytes) -> bytes:
        return cast(bytes, self.perform(Operation("claim", key, value)))

    def read(self, key: str) -> bytes | None:
        return cast("bytes | None", self.perform(Operation("read", key)))

    def wait_for(self, key: str, timeout: float | None) -> bytes:
        return cast(bytes, self.perform(Operation(WAIT, key), timeout))

    def add(self, key: str, amount: int) -> int:
        return cast(int, self.perform(Operation("add", key, amount=amount)))

    def add_and_read(self, key: str, amount: int, other: str) -> tuple[int, bytes]:
        add = Operation("add", key, amount=amount)
        total, value = self.perform_all(add, Operation("read", other))
        return total, value or b""

    def read_all(self, *keys: str) -> list[bytes | None]:
        found = self.perform_all(*(Operation("read", key) for key in keys))
        return [value or None for value in found]

    def perform_all(self, *parts: Operation) -> list[Any]:
        """Performs all as one; a `StoreError` if one of them fails."""
        found = cast(list[Any], self.perform(Operation(BATCH, operations=parts)))
        for each in found:
            if isinstance(each, Failed):
                raise StoreError(each.reason)
        return found

    def append(self, key: str, value: bytes) -> None:
        self.perform(Operation("append", key, value))

    def delete(self, *keys: str) -> None:
        for key in keys:
            self.perform(Operation("delete", key))

    def delete_prefix(self, prefix: str) -> None:
        """Removes all keys that begin with `prefix`, in one operation."""
        self.perform(Operation("delete_prefix", prefix))
