"""A `torch.distributed` store as a `Store`.

torch's own store is used because every launcher of the field already hosts one, it is well kept,
and a wait on it is an event: the server answers when the key appears. Two things are added:
errors that name host and port, and reads that do not wait (`compare_set` with an expected value
that no key ever has returns what the key holds, in one operation).
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from outlast.coordination.store import KeyTimeout
from outlast.errors import StoreError

__all__ = ["TorchStore"]

T = TypeVar("T")

# No key ever holds this, so compare_set() with it never writes over a value.
_NEVER = "\x00outlast-never\x00"
# For a wait without a limit. torch takes milliseconds in a signed 64-bit number, but turns them
# into nanoseconds in places: ten years stay clear of that.
_FOREVER = datetime.timedelta(days=3650)


class TorchStore:
    """Performs the operations of `Store` on one torch store, that is on one connection.

    A connection serves one operation at a time: a thread that waits on it holds up all others,
    so whoever waits has a connection of its own.

    Args:
        store: any `torch.distributed.Store`.
        where: what to call it in errors, e.g. `node1:29500`.
    """

    def __init__(self, store: Any, where: str) -> None:
        self.torch_store = store
        self.where = where

    def put(self, key: str, value: bytes) -> None:
        self._try(lambda: self.torch_store.set(key, value.decode()))

    def claim(self, key: str, value: bytes) -> bytes:
        return self._try(lambda: bytes(self.torch_store.compare_set(key, "", value.decode())))

    def read(self, key: str) -> bytes | None:
        held = self._try(lambda: bytes(self.torch_store.compare_set(key, _NEVER, "")))
        return None if held in (b"", _NEVER.encode()) else held

    def wait_for(self, key: str, timeout: float | None) -> bytes:
        limit = _FOREVER if timeout is None else datetime.timedelta(seconds=max(timeout, 0.001))
        try:
            self.torch_store.wait([key], limit)
        except dist.DistStoreError as e:
            raise KeyTimeout(f"{key!r} did not appear within {timeout} s at {self.where}") from e
        except (dist.DistNetworkError, RuntimeError) as e:
            raise self._lost(e) from e
        return self._try(lambda: bytes(self.torch_store.get(key)))

    def add(self, key: str, amount: int) -> int:
        return self._try(lambda: int(self.torch_store.add(key, amount)))

    def append(self, key: str, value: bytes) -> None:
        self._try(lambda: self.torch_store.append(key, value.decode()))

    def delete(self, key: str) -> None:
        self._try(lambda: self.torch_store.delete_key(key))

    def _try(self, operation: Callable[[], T]) -> T:
        try:
            return operation()
        except (dist.DistError, RuntimeError) as e:
            raise self._lost(e) from e

    def _lost(self, cause: Exception) -> StoreError:
        first_line = str(cause).partition("\n")[0]
        return StoreError(f"the store at {self.where} cannot be reached: {first_line}")
