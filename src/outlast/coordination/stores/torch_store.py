"""A `torch.distributed` store as a `Store`.

torch's own store is used because every launcher hosts one already, it is well maintained, and a
wait on it is event-driven: the server answers when the key appears. This class adds errors that
name host and port, and reads that do not wait.

A read is two operations, `check`, and `compare_set` with an expected value that no key ever has,
which returns the value. `get` would wait for a key that was deleted in between, and hold up the
connection meanwhile. `compare_set` alone would be enough; but torch's server wakes all waiters of a
key at every `compare_set` on it, even if that leaves the key absent (seen on torch 2.13). For the
same reason a wait checks for the key when it returns. The store server of a host does not wake
them, so there a read is `compare_set` alone (`one_request_reads`).

torch's other server, which is not based on libuv, wakes nobody at a `compare_set` (seen on torch
2.6 to 2.15). A client does not know which one it has; so a claim that succeeds appends nothing to
its key, at which both wake the waiters.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from outlast.coordination.stores.store import KeyTimeout
from outlast.errors import StoreError
from outlast.system.error_text import first_line

T = TypeVar("T")

# For a wait without a limit. torch takes milliseconds in a signed 64-bit number, but converts them
# to nanoseconds in places: ten years do not overflow there.
_FOREVER = datetime.timedelta(days=3650)
_NEVER = "outlast: not a value"
# The message of FileStore, a plain RuntimeError; the other stores have a type for it.
_FILE_TIMEOUT = "Wait timeout"


def listening(descriptor: int) -> dict[str, Any]:
    """The arguments of a `torch.distributed.TCPStore` that serves on this listening socket, and
    closes it. Before torch 2.8, the server that is based on libuv cannot.
    """
    return {"master_listen_fd": descriptor, "use_libuv": TorchVersion(torch.__version__) >= "2.8"}


class TorchStore:
    """Performs the operations of `Store` on one torch store, i.e. on one connection.

    A connection serves one operation at a time: a thread that waits on it blocks all others, so
    each waiting thread needs its own connection. `where` is its name in errors, e.g. `node1:29500`.
    """

    one_request_reads = False

    def __init__(self, store: Any, where: str) -> None:
        self.torch_store = store
        self.where = where

    def put(self, key: str, value: bytes) -> None:
        self._try(lambda: self.torch_store.set(key, value.decode()))

    def claim(self, key: str, value: bytes) -> bytes:
        found = self._try(lambda: bytes(self.torch_store.compare_set(key, "", value.decode())))
        tcp = isinstance(self.torch_store, dist.TCPStore)  # type: ignore[attr-defined]
        if found == value and tcp and not self.one_request_reads:
            self.append(key, b"")  # only to wake those who wait for the key
        return found

    def read(self, key: str) -> bytes | None:
        if not self.one_request_reads and not self._try(
            lambda: bool(self.torch_store.check([key]))
        ):
            return None
        value = self._try(lambda: bytes(self.torch_store.compare_set(key, _NEVER, _NEVER)))
        return None if value == _NEVER.encode() else value

    def wait_for(self, key: str, timeout: float | None) -> bytes:
        limit = _FOREVER if timeout is None else datetime.timedelta(seconds=max(timeout, 0.001))
        while True:
            late: Exception | None = None
            try:
                self.torch_store.wait([key], limit)
            except RuntimeError as e:
                if not isinstance(e, dist.DistStoreError) and str(e) != _FILE_TIMEOUT:
                    raise self._lost(e) from e
                late = e  # but the key may have appeared at the last moment
            value = self.read(key)
            if value is not None:
                return value
            if late is not None:
                raise KeyTimeout(f"no {key!r} within {timeout} s at {self.where}") from late

    def add(self, key: str, amount: int) -> int:
        return self._try(lambda: int(self.torch_store.add(key, amount)))

    def append(self, key: str, value: bytes) -> None:
        self._try(lambda: self.torch_store.append(key, value.decode()))

    def delete(self, key: str) -> None:
        self._try(lambda: self.torch_store.delete_key(key))

    def _try(self, operation: Callable[[], T]) -> T:
        try:
            return operation()
        except RuntimeError as e:
            raise self._lost(e) from e

    def _lost(self, cause: Exception) -> StoreError:
        return StoreError(f"the store at {self.where} cannot be reached: {first_line(cause)}")
