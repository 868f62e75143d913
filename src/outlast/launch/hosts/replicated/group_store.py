"""The store of the group for the agent's other threads: synchronous, with the seven operations of
`outlast.coordination.stores.store.Store`, and two more.
"""

from __future__ import annotations

import threading
import time

from outlast.coordination.replicated.operations import Failed, Keys, Operation, Result
from outlast.coordination.stores.store import KeyTimeout
from outlast.errors import StoreError
from outlast.launch.hosts.replicated.service import HostService


class GroupStore:
    """Performs operations through the host service. Any number of threads may use it at once.

    Every operation raises a `StoreError` as soon as the lease of this host is over, and those that
    are under way then; an operation that failed may have been performed.
    """

    def __init__(self, service: HostService, where: str, lease_s: float) -> None:
        self._service = service
        self._where = where
        self._lease_s = lease_s

    def put(self, key: str, value: bytes) -> None:
        self._perform(Operation("put", key, value))

    def claim(self, key: str, value: bytes) -> bytes:
        return _bytes(self._perform(Operation("claim", key, value)))

    def read(self, key: str) -> bytes | None:
        found = self._perform(Operation("read", key))
        return None if found is None else _bytes(found)

    def wait_for(self, key: str, timeout: float | None) -> bytes:
        found = self._perform(Operation("wait_for", key), timeout)
        if found is not None:
            return _bytes(found)
        value = self.read(key)  # it may have appeared at the last moment
        if value is None:
            raise KeyTimeout(f"no {key!r} within {timeout} s at {self._where}")
        return value

    def add(self, key: str, amount: int) -> int:
        total = self._perform(Operation("add", key, amount=amount))
        assert isinstance(total, int)
        return total

    def append(self, key: str, value: bytes) -> None:
        self._perform(Operation("append", key, value))

    def delete(self, key: str) -> None:
        self._perform(Operation("delete", key))

    def keys(self, prefix: str) -> list[str]:
        """The keys that start with `prefix`, sorted."""
        found = self._perform(Operation("keys", prefix))
        assert isinstance(found, Keys)
        return list(found.names)

    def delete_prefix(self, prefix: str) -> None:
        """Removes the keys that start with `prefix`."""
        self._perform(Operation("delete_prefix", prefix))

    def _perform(self, operation: Operation, timeout: float | None = None) -> Result:
        """The result; for a wait, `None` after `timeout`."""
        pending = _Pending()
        service = self._service

        def begin() -> None:
            pending.handle = service.submit(operation, pending.finish)

        if not service.call(begin):
            raise self._lost(service.state.error or "it is closed")
        deadline = None if timeout is None else time.monotonic() + timeout
        while not pending.done.wait(self._patience(deadline)):
            if deadline is not None and time.monotonic() >= deadline:
                service.call(lambda: service.cancel(pending.handle))
                return None
            if service.stuck():
                raise self._lost("the lease of this host is over, and its host service hangs")
        if isinstance(pending.result, Failed):
            raise self._lost(service.state.error or pending.result.reason)
        return pending.result

    def _patience(self, deadline: float | None) -> float:
        left_s = self._lease_s if deadline is None else deadline - time.monotonic()
        return max(0.0, min(left_s, self._lease_s))

    def _lost(self, reason: str) -> StoreError:
        return StoreError(f"the store of {self._where} cannot be reached: {reason}")


class _Pending:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.result: Result = None
        self.handle: object = None

    def finish(self, result: Result) -> None:
        self.result = result
        self.done.set()


def _bytes(result: Result) -> bytes:
    assert isinstance(result, bytes)
    return result
