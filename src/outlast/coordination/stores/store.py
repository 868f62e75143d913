"""The store protocol: the few atomic operations on which all coordination is built.

A store is a table of bytes, shared by all processes of a job. Each operation is atomic at the
store, which therefore puts all of them into one order; the proofs in `barrier.py` and
`membership.py` rely on that and on nothing else. There are two implementations, torch's
(`torch_store.py`) and one in memory (`memory_store.py`); the deterministic simulation
(`tests/simulation`) performs the operations on the latter, one at a time.
"""

from __future__ import annotations

from typing import Protocol

from outlast.errors import OutlastError

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
        """Waits until `key` exists, and returns its value; a `KeyTimeout` after `timeout` seconds.
        `None` waits for as long as the store lives.
        """

    def add(self, key: str, amount: int) -> int:
        """Adds to the number under `key` (0 if absent); returns the sum."""

    def append(self, key: str, value: bytes) -> None:
        """Appends to the value of `key` (empty if absent)."""

    def delete(self, key: str) -> None:
        """Removes `key`, if it exists."""
