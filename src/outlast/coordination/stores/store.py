"""The store protocol: the few atomic operations that everything else is built from.

A store is a table of bytes, shared by all processes of a job. Each operation is atomic at the
store, which therefore puts all of them into one order; the proofs in `barrier.py` and
`membership.py` rest on that and on nothing else. Three kinds exist: torch's
(`stores/torch_store.py`), one in memory (`stores/memory_store.py`), and the deterministic
simulation (`scheduler.py`).
"""

from __future__ import annotations

from typing import Protocol

from outlast.errors import OutlastError

__all__ = ["KeyTimeout", "Store"]


class KeyTimeout(OutlastError):
    """A key did not appear within the time given."""


class Store(Protocol):
    """What the coordination needs of a store. Keys are text, values bytes.

    Every method raises `outlast.errors.StoreError` when the store cannot be reached.
    """

    def put(self, key: str, value: bytes) -> None:
        """Sets `key`, whatever it was."""
        ...

    def claim(self, key: str, value: bytes) -> bytes:
        """Sets `key` if it is absent; returns what it holds afterwards. The first claim wins."""
        ...

    def read(self, key: str) -> bytes | None:
        """What `key` holds, or `None`. Never waits."""
        ...

    def wait_for(self, key: str, timeout: float | None) -> bytes:
        """Waits until `key` exists, and returns what it holds.

        Args:
            key: the key.
            timeout: in seconds; `None` waits for as long as the store lives.

        Raises:
            KeyTimeout: when the time is over.
        """
        ...

    def add(self, key: str, amount: int) -> int:
        """Adds to the number under `key` (0 if absent); returns the sum."""
        ...

    def append(self, key: str, value: bytes) -> None:
        """Appends to what `key` holds (nothing if absent)."""
        ...

    def delete(self, key: str) -> None:
        """Removes `key`, if it is there."""
        ...
