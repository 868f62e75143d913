"""The store on etcd: performs the operations of `operations.py` on real connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from outlast.coordination.replicated.operations import (
    BATCH,
    WAIT,
    Failed,
    Operation,
    OperationStore,
    Result,
)
from outlast.coordination.stores.etcd import layout
from outlast.coordination.stores.etcd.client import EtcdClient, no_answer, pause_before
from outlast.coordination.stores.etcd.connection import Refused
from outlast.coordination.stores.etcd.operations import (
    Call,
    Event,
    Fence,
    NoAnswer,
    Operations,
    Slot,
)
from outlast.coordination.stores.etcd.watch import Waits
from outlast.coordination.stores.store import drive
from outlast.errors import StoreError

T = TypeVar("T")

LIMIT_S = 30.0
"""How long etcd may not answer before an operation fails: longer than an election takes."""


class EtcdStore(OperationStore):
    """A store in a part of etcd. Threads may share it.

    Args:
        root: the prefix of all keys, which ends in "/".
        name: the name of this client; unique among all clients that ever use `root`.
        fence: the lease under which to write.
        limit_s: how long etcd may take to answer an operation, in seconds.
        check: called before each attempt; raises an error if this host may not act any more.
    """

    def __init__(
        self,
        client: EtcdClient,
        root: str,
        name: str,
        fence: Fence | None = None,
        limit_s: float = LIMIT_S,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        if not root.endswith("/"):
            raise ValueError(f'root: expected a prefix that ends in "/", not {root!r}')
        self._client, self._root, self._name = client, root.encode(), name
        self._fence, self._limit_s, self._check = fence or Fence(), limit_s, check
        self._lock = threading.Lock()
        self._slots: list[Slot] = []
        self._made = 0
        self.where = f"etcd {client.where}"
        self.waits = Waits(client, layout.store_keys(self._root))
        self._closed = False

    def perform(self, operation: Operation, timeout: float | None = None) -> Result:
        """Parts of a batch take effect together, as far as one transaction can hold them."""
        if operation.name == WAIT:
            return self._run(lambda on: on.wait_for(operation.key, timeout), timeout)
        parts = operation.operations if operation.name == BATCH else (operation,)
        results = self._run(lambda on: on.perform(parts))
        if operation.name == BATCH:
            return results
        if isinstance(results[0], Failed):
            raise StoreError(results[0].reason)
        return results[0]

    def look(self, key: str) -> tuple[bytes | None, int]:
        """`read`, and the revision of that: with `base_of`, what a wait in `waits` begins with."""
        return self._run(lambda on: on.look(key))

    def base_of(self, key: str) -> bytes:
        """The key of etcd that is written when `key` appears."""
        return layout.base_key(self._root, key)

    def raise_if_unusable(self) -> None:
        """Raises a `StoreError` if the store is closed, or this host may not act any more."""
        if self._closed:
            raise StoreError(f"the connection to {self.where} was closed")
        self._check()

    def close(self) -> None:
        """Ends all waits, with a `StoreError`. The client stays open."""
        self._closed = True
        self.waits.close()

    def _run(
        self, begin: Callable[[Operations], Coroutine[Any, Any, T]], timeout: float | None = None
    ) -> T:
        slot = self._take()
        try:
            return drive(
                begin(Operations(self._root, slot, self._fence)), _Driver(self, timeout).perform
            )
        except Refused as e:
            raise StoreError(f"{self.where} refused an operation: {e}") from e
        finally:
            with self._lock:
                self._slots.append(slot)

    def _take(self) -> Slot:
        with self._lock:
            if self._slots:
                return self._slots.pop()
            self._made += 1
            return Slot(self._root, f"{self._name}.{self._made}")


class _Driver:
    """Performs the requests of one operation."""

    def __init__(self, store: EtcdStore, timeout: float | None) -> None:
        self._store = store
        self._wait_until = None if timeout is None else time.monotonic() + timeout
        self._deadline = 0.0
        self._cause: Exception = NoAnswer("none")

    def perform(self, asked: Call | Event) -> Any:
        return self._call(asked) if isinstance(asked, Call) else self._wait(asked)

    def _call(self, asked: Call) -> Any:
        store, client = self._store, self._store._client
        if asked.attempt == 0:
            self._deadline = time.monotonic() + store._limit_s
        else:
            pause = pause_before(asked.attempt, len(client.endpoints))
            if time.monotonic() + pause >= self._deadline:
                raise no_answer(client, store._limit_s, self._cause)
            time.sleep(pause)
        store.raise_if_unusable()
        try:
            return client.call(asked.path, asked.body, self._deadline - time.monotonic())
        except NoAnswer as e:
            self._cause = e
            raise

    def _wait(self, asked: Event) -> bytes | bool:
        until = self._wait_until
        left = None if until is None else max(0.0, until - time.monotonic())
        return self._store.waits.wait(asked.base, asked.base + b"\0", asked.after, left)
