"""Protocol code without input and output: coroutines that yield store operations.

The protocol (`barrier.py`, `membership.py`, and the state machine of `outlast.inprocess`) is
written as coroutines with `await link.append(...)`. Their driver performs the operations: `drive()`
performs each one on a real store, blocking; the deterministic simulation performs them one at a
time, in any order, and may stop a member for good between two: it tests the code of a job.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, cast

from outlast.coordination.stores.store import Store
from outlast.coordination.stores.store import drive as drive


@dataclass(frozen=True)
class Op:
    """One store operation. `name` is a method of `Store`."""

    name: str
    key: str
    value: bytes = b""
    amount: int = 0
    timeout: float | None = None


@types.coroutine
def request(op: Op) -> Generator[Op, Any, Any]:
    """Yields `op` to the driver; returns its result."""
    return (yield op)


class Link:
    """A store as the protocol sees it: every operation is yielded to the driver. The prefix applies
    to every key, so that the calls of one job do not share keys.
    """

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix

    async def put(self, key: str, value: bytes) -> None:
        await request(Op("put", self.prefix + key, value))

    async def claim(self, key: str, value: bytes) -> bytes:
        return cast(bytes, await request(Op("claim", self.prefix + key, value)))

    async def read(self, key: str) -> bytes | None:
        return cast("bytes | None", await request(Op("read", self.prefix + key)))

    async def wait_for(self, key: str, timeout: float | None) -> bytes:
        return cast(bytes, await request(Op("wait_for", self.prefix + key, timeout=timeout)))

    async def add(self, key: str, amount: int) -> int:
        return cast(int, await request(Op("add", self.prefix + key, amount=amount)))

    async def append(self, key: str, value: bytes) -> None:
        await request(Op("append", self.prefix + key, value))

    async def delete(self, key: str) -> None:
        await request(Op("delete", self.prefix + key))


def perform_on(store: Store) -> Callable[[Op], Any]:
    """A performer for `drive()` that runs each operation on `store`, in this thread."""

    def perform(op: Op) -> Any:
        if op.name == "wait_for":
            return store.wait_for(op.key, op.timeout)
        if op.name == "add":
            return store.add(op.key, op.amount)
        if op.name in ("read", "delete"):
            return getattr(store, op.name)(op.key)
        return getattr(store, op.name)(op.key, op.value)

    return perform
