"""The workers' store of this host, as its agent uses it: like a worker."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

from outlast.coordination.stores.tcp_client import TcpClient
from outlast.errors import StoreError

T = TypeVar("T")

_LIMIT_S = 10.0
"""How long the store may take to answer. Longer than an election; a lease that is over is noticed
earlier.
"""


class WorkersStore(TcpClient):
    """A new attempt closes the connections of the one before, so an operation whose connection is
    closed is repeated once. The agent's operations allow that: it appends only what may be there
    twice.

    Args:
        why: why this host may no longer act; empty if it may. The server ends with the lease, and
            this is the reason to name.
    """

    def __init__(self, host: str, port: int, why: Callable[[], str]) -> None:
        super().__init__(host, port, _LIMIT_S)
        self._why = why

    def _perform(self, work: Callable[[socket.socket], T]) -> T:
        try:
            return super()._perform(work)
        except StoreError:
            pass
        try:
            return super()._perform(work)
        except StoreError as e:
            raise StoreError(self._why() or str(e)) from e
