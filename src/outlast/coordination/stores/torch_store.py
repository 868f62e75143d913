"""A `torch.distributed` store as a `Store`: torch's own client, for stores other than TCP stores,
and for the process that serves a TCP store. All others use `TcpClient`.

A read is two operations, `check`, and `compare_set` with an expected value that no key ever has,
which returns the value. `get` would wait for a key that was deleted in between. `compare_set` alone
would be enough; but torch's TCP server wakes all waiters of a key at every `compare_set` on it,
even if that leaves the key absent (seen on torch 2.13).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from outlast.coordination.stores.store import KeyTimeout, Store
from outlast.errors import StoreError
from outlast.system.error_text import first_line

T = TypeVar("T")

_NEVER = "outlast: not a value"
_POLL_S = 0.01  # as torch's FileStore does


def listening(descriptor: int) -> dict[str, Any]:
    """The arguments of a `torch.distributed.TCPStore` that serves on this listening socket, and
    closes it. Before torch 2.8, the server that is based on libuv cannot.
    """
    return {"master_listen_fd": descriptor, "use_libuv": TorchVersion(torch.__version__) >= "2.8"}


class TorchStore(Store):
    """Performs the operations of `Store` on a torch store; `where` is its name in errors.

    A wait polls: torch would wait in C++, where no signal arrives and no other thread can end it,
    and would hold up the operations of all other threads.
    """

    def __init__(self, store: Any, where: str) -> None:
        self.torch_store = store
        self.where = where
        self._broken = threading.Event()

    def put(self, key: str, value: bytes) -> None:
        self._try(lambda: self.torch_store.set(key, value.decode()))

    def claim(self, key: str, value: bytes) -> bytes:
        found = self.compare_set(key, b"", value)
        if found == value and isinstance(self.torch_store, dist.TCPStore):  # type: ignore[attr-defined]
            self.append(key, b"")  # only to wake those who wait for the key, as in `TcpClient`
        return found

    def compare_set(self, key: str, before: bytes, after: bytes) -> bytes:
        return self._try(
            lambda: bytes(self.torch_store.compare_set(key, before.decode(), after.decode()))
        )

    def read(self, key: str) -> bytes | None:
        if not self._try(lambda: bool(self.torch_store.check([key]))):
            return None
        value = self._try(lambda: bytes(self.torch_store.compare_set(key, _NEVER, _NEVER)))
        return None if value == _NEVER.encode() else value

    def wait_for(self, key: str, timeout: float | None) -> bytes:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (value := self.read(key)) is None:
            left = _POLL_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise KeyTimeout(f"no {key!r} within {timeout} s at {self.where}")
            if self._broken.wait(min(_POLL_S, left)):
                raise StoreError(f"the wait at the store {self.where} was broken off")
        return value

    def add(self, key: str, amount: int) -> int:
        return self._try(lambda: int(self.torch_store.add(key, amount)))

    def append(self, key: str, value: bytes) -> None:
        self._try(lambda: self.torch_store.append(key, value.decode()))

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._try(partial(self.torch_store.delete_key, key))

    def break_off(self) -> None:
        self._broken.set()

    def close(self) -> None:
        self.torch_store = None

    def _try(self, operation: Callable[[], T]) -> T:
        try:
            return operation()
        except RuntimeError as e:
            raise StoreError(f"the store at {self.where} cannot be reached: {first_line(e)}") from e
