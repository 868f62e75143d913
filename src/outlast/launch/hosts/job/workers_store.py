"""The workers' store of this host, as its agent uses it: like a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from outlast.coordination.stores.tcp_client import TcpClient
from outlast.errors import StoreError

T = TypeVar("T")

_LIMIT_S = 10.0
"""How long the store may take to answer. Longer than an election; a lease that is over is noticed
earlier.
"""


class WorkersStore:
    """A `Store`. A new attempt closes the connections of the one before, so an operation whose
    connection is closed is repeated once. The agent's operations allow that: it appends only what
    may be there twice.

    Args:
        why: why this host may no longer act; empty if it may. The server ends with the lease, and
            this is the reason to name.
    """

    def __init__(self, host: str, port: int, why: Callable[[], str]) -> None:
        self._client = TcpClient(host, port, _LIMIT_S)
        self._why = why

    def put(self, key: str, value: bytes) -> None:
        self._try(lambda: self._client.put(key, value))

    def claim(self, key: str, value: bytes) -> bytes:
        return self._try(lambda: self._client.claim(key, value))

    def read(self, key: str) -> bytes | None:
        return self._try(lambda: self._client.read(key))

    def wait_for(self, key: str, timeout: float | None) -> bytes:
        return self._try(lambda: self._client.wait_for(key, timeout))

    def add(self, key: str, amount: int) -> int:
        return self._try(lambda: self._client.add(key, amount))

    def append(self, key: str, value: bytes) -> None:
        self._try(lambda: self._client.append(key, value))

    def delete(self, key: str) -> None:
        self._try(lambda: self._client.delete(key))

    def close(self) -> None:
        """Close the connection. The next operation opens another."""
        self._client.close()

    def _try(self, operation: Callable[[], T]) -> T:
        try:
            return operation()
        except StoreError:
            pass
        try:
            return operation()
        except StoreError as e:
            raise StoreError(self._why() or str(e)) from e
