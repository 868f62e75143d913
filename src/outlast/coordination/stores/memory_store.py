"""A store in memory: for one process with many members (threads), and for tests."""

from __future__ import annotations

import threading
import time
from collections import Counter

from outlast.coordination.stores.store import KeyTimeout


class MemoryStore:
    """A `Store` in this process. `ops` counts the operations by name."""

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

    def delete(self, key: str) -> None:
        with self._changed:
            self.ops["delete"] += 1
            self.table.pop(key, None)
