"""Protocol code without input and output of its own: coroutines that await store operations.

The protocol (`barrier.py`, `membership.py`, and the state machine of `outlast.inprocess`) is
written as coroutines with `await link.append(...)`. In a job, the link performs each operation on a
store, at once and blocking: the coroutine runs to its end (`run`), and each call goes down only. In
the deterministic simulation a link has no store, and yields its operations. The simulation performs
them one at a time, in any order, and may stop a member for good between two: it tests the code of a
job.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from outlast.coordination.stores.store import Store
from outlast.coordination.stores.store import drive as drive
from outlast.errors import InternalError

T = TypeVar("T")


@dataclass(frozen=True)
class Op:
    """One store operation. `name` is a method of `Store`; `others` are further keys."""

    name: str
    key: str
    value: bytes = b""
    amount: int = 0
    timeout: float | None = None
    others: tuple[str, ...] = ()


@types.coroutine
def request(op: Op) -> Generator[Op, Any, Any]:
    """Yields `op` to the driver; returns its result."""
    return (yield op)


class Link:
    """A store as the protocol sees it: `perform` performs each operation; without it, each is
    yielded to a driver. The prefix applies to every key, so that the calls of one job do not share
    keys.
    """

    def __init__(self, prefix: str = "", perform: Callable[[Op], Any] | None = None) -> None:
        self.prefix, self.perform = prefix, perform

    def at(self, prefix: str) -> Link:
        """The same store, with another prefix."""
        return Link(prefix, self.perform)

    async def _do(self, op: Op) -> Any:
        return await request(op) if self.perform is None else self.perform(op)

    async def put(self, key: str, value: bytes) -> None:
        await self._do(Op("put", self.prefix + key, value))

    async def claim(self, key: str, value: bytes) -> bytes:
        return cast(bytes, await self._do(Op("claim", self.prefix + key, value)))

    async def read(self, key: str) -> bytes | None:
        return cast("bytes | None", await self._do(Op("read", self.prefix + key)))

    async def wait_for(self, key: str, timeout: float | None) -> bytes:
        return cast(bytes, await self._do(Op("wait_for", self.prefix + key, timeout=timeout)))

    async def add(self, key: str, amount: int) -> int:
        return cast(int, await self._do(Op("add", self.prefix + key, amount=amount)))

    async def add_and_read(self, key: str, amount: int, other: str) -> tuple[int, bytes]:
        """`add`, then `read` of another key (empty if absent): one request, where a store can."""
        if self.perform is None:
            return await self.add(key, amount), await self.read(other) or b""
        op = Op("add_and_read", self.prefix + key, amount=amount, others=(self.prefix + other,))
        return cast("tuple[int, bytes]", await self._do(op))

    async def read_all(self, *keys: str) -> list[bytes | None]:
        """`read` of each key, in this order or all at once: one request, where a store can."""
        if self.perform is None:
            return [await self.read(key) for key in keys]
        names = tuple(self.prefix + key for key in keys)
        return cast("list[bytes | None]", await self._do(Op("read_all", names[0], others=names)))

    async def append(self, key: str, value: bytes) -> None:
        await self._do(Op("append", self.prefix + key, value))

    async def delete(self, key: str) -> None:
        await self._do(Op("delete", self.prefix + key))


def perform_on(store: Store) -> Callable[[Op], Any]:
    """Performs each operation on `store`, in this thread: for a `Link`, or for `drive()`."""

    def perform(op: Op) -> Any:
        if op.name == "wait_for":
            return store.wait_for(op.key, op.timeout)
        if op.name == "add":
            return store.add(op.key, op.amount)
        if op.name == "add_and_read":
            return store.add_and_read(op.key, op.amount, *op.others)
        if op.name == "read_all":
            return store.read_all(*op.others)
        if op.name in ("read", "delete"):
            return getattr(store, op.name)(op.key)
        return getattr(store, op.name)(op.key, op.value)

    return perform


def run(coroutine: Coroutine[Op, Any, T]) -> T:
    """Runs a coroutine to its end, in this thread. Its link performs the operations."""
    try:
        op = coroutine.send(None)
    except StopIteration as stop:
        return cast(T, stop.value)
    coroutine.close()
    raise InternalError(f"{op.name} of {op.key!r} is not performed: the link has no store")
