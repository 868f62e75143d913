"""What the replicated store can do, what it answers, and how both are encoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

READS = frozenset({"read", "check", "keys"})
WRITES = frozenset({"put", "claim", "add", "append", "delete", "compare_set", "delete_prefix"})
WAIT = "wait_for"
BATCH = "batch"


@dataclass(frozen=True)
class Failed:
    """The result of an operation that was given up; it may have been performed all the same."""

    reason: str


@dataclass(frozen=True)
class Operation:
    """One operation.

    Its result depends on `name`:

    * `put`, `append`: `None`. `delete`, `delete_prefix`: the number of keys that were removed.
    * `claim`: sets the key if it is absent; the value afterwards.
    * `read`: the value, or `None`. `check`: 1 if the key exists, else 0.
    * `wait_for`: the value, as soon as there is one.
    * `add`: the number under the key (0 if absent) plus `amount`.
    * `compare_set`: sets the key to `value` if its value is `expected` (`b""`: or if it is absent);
      the value afterwards, or `None`.
    * `keys`: the sorted keys that start with `key`.
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


Result: TypeAlias = "bytes | int | list[Any] | Failed | None"


def pack_operation(op: Operation) -> list[Any]:
    """As a JSON value. Bytes become text with one character per byte."""
    if op.name == BATCH:
        return [BATCH, [pack_operation(part) for part in op.operations]]
    packed = [op.name, op.key, op.value.decode("latin-1"), op.amount, op.expected.decode("latin-1")]
    while len(packed) > 2 and not packed[-1]:
        packed.pop()
    return packed


def unpack_operation(packed: list[Any]) -> Operation:
    """The reverse of `pack_operation`."""
    if packed[0] == BATCH:
        return Operation(BATCH, operations=tuple(unpack_operation(part) for part in packed[1]))
    defaults: list[Any] = ["", 0, ""]
    name, key, value, amount, expected = packed + defaults[len(packed) - 2 :]
    return Operation(name, key, value.encode("latin-1"), amount, expected.encode("latin-1"))


def pack_result(result: Result) -> Any:
    """As a JSON value."""
    if isinstance(result, bytes):
        return result.decode("latin-1")
    if isinstance(result, Failed):
        return {"failed": result.reason}
    if isinstance(result, list):
        if all(isinstance(part, str) for part in result) and result:
            return {"keys": result}
        return [pack_result(part) for part in result]
    return result


def unpack_result(packed: Any) -> Result:
    """The reverse of `pack_result`."""
    if isinstance(packed, str):
        return packed.encode("latin-1")
    if isinstance(packed, dict):
        return Failed(packed["failed"]) if "failed" in packed else list(packed["keys"])
    if isinstance(packed, list):
        return [unpack_result(part) for part in packed]
    return None if packed is None else int(packed)
