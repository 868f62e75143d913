"""The store protocol: the few atomic operations on which all coordination is built.

A store is a table of bytes, shared by all processes of a job. Each operation is atomic at the
store, which therefore puts all of them into one order; the proofs in `barrier.py` and
`membership.py` rely on that and on nothing else. Only a wait is weaker (see `wait_for`): the keys
that they wait for are written once, and replaced or deleted only iterations later. The
implementations are `tcp_client.py`, `torch_store.py`, `etcd/`, and one in memory; the deterministic
simulation (`tests/simulation`) performs the operations on the latter, one at a time.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar, cast

from outlast.errors import OutlastError

T = TypeVar("T")

HOST_KEYS = "outlast/this-host/"
"""Keys with this prefix are the host's own, where each host has a server of the store: it keeps
them, and they are lost with it.
"""


class KeyTimeout(OutlastError):
    """A key did not appear within the time given."""


class Store(Protocol):
    """The operations that the coordination needs. Keys are text, values bytes.

    Every method raises `outlast.errors.StoreError` when the store cannot be reached.
    """

    def put(self, key: str, value: bytes) -> None:
        """Sets `key`, overwriting any existing value."""

    def claim(self, key: str, value: bytes) -> bytes:
        """Sets `key` if it is absent; returns its value afterwards. The first claim wins."""

    def read(self, key: str) -> bytes | None:
        """The value of `key`, or `None`. Never waits."""

    def wait_for(self, key: str, timeout: float | None) -> bytes:
        """The value of `key`, once it exists; a `KeyTimeout` after `timeout` seconds, if any.

        For keys that are written once. If a key is written again or deleted, this may return an
        older value: one that the key had since another client of this host began to wait for it, or
        since this host last saw that it was absent.
        """

    def add(self, key: str, amount: int) -> int:
        """Adds to the number under `key` (0 if absent); returns the sum."""

    def append(self, key: str, value: bytes) -> None:
        """Appends to the value of `key` (empty if absent)."""

    def delete(self, *keys: str) -> None:
        """Removes these keys, each if it exists; in one request, where the store can do that."""

    # A store that can do so performs these in one request.

    def add_and_read(self, key: str, amount: int, other: str) -> tuple[int, bytes]:
        """`add`, and then the value of `other`, empty if absent."""
        return self.add(key, amount), self.read(other) or b""

    def read_all(self, *keys: str) -> list[bytes | None]:
        """The values of these keys, in this order or all at once; `None` for one without any."""
        return [self.read(key) for key in keys]


class MemoryStore(Store):
    """A `Store` in this process, for any number of threads; `ops` counts operations by name."""

    def __init__(self) -> None:
        self.table: dict[str, bytes] = {}
        self.ops: Counter[str] = Counter()
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self.ops["put"] += 1
            self.table[key] = value
            self._changed.notify_all()

    def claim(self, key: str, value: bytes) -> bytes:
        with self._changed:
            self.ops["claim"] += 1
            held = self.table.setdefault(key, value)
            self._changed.notify_all()
            return held

    def read(self, key: str) -> bytes | None:
        with self._changed:
            self.ops["read"] += 1
            return self.table.get(key)

    def wait_for(self, key: str, timeout: float | None) -> bytes:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self.ops["wait_for"] += 1
            while key not in self.table:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise KeyTimeout(f"{key!r} did not appear within {timeout} s")
                self._changed.wait(left)
            return self.table[key]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            self.ops["add"] += 1
            total = int(self.table.get(key, b"0")) + amount
            self.table[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def append(self, key: str, value: bytes) -> None:
        with self._changed:
            self.ops["append"] += 1
            self.table[key] = self.table.get(key, b"") + value
            self._changed.notify_all()

    def delete(self, *keys: str) -> None:
        with self._changed:
            self.ops["delete"] += 1
            for key in keys:
                self.table.pop(key, None)


def drive(coroutine: Coroutine[Any, Any, T], perform: Callable[[Any], Any]) -> T:
    """Runs `coroutine` to its end, performing the operations that it yields.

    An exception of an operation is raised in the coroutine, at its `await`; the result or the
    exception of the coroutine is that of `drive`.
    """
    result: Any = None
    error: BaseException | None = None
    try:
        while True:
            try:
                op = coroutine.send(result) if error is None else coroutine.throw(error)
            except StopIteration as stop:
                return cast(T, stop.value)
            result, error = None, None
            try:
                result = perform(op)
            except BaseException as e:  # noqa: BLE001 - raised in the coroutine
                error = e
    finally:
        error = None  # the exception holds this frame: without this the two would be a cycle
        coroutine.close()
