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

    def close(self) -> None:
        """Ends all waits, with a `StoreError`. The client stays open."""
        self._closed = True
        self.waits.close()

    def _run(
        self, begin: Callable[[Operations], Coroutine[Any, Any, T]], timeout: float | None = None
    ) -> T:
        until = None if timeout is None else time.monotonic() + timeout
        deadline, cause = 0.0, NoAnswer("none")

        def perform(asked: Call | Event) -> Any:
            nonlocal deadline, cause
            if isinstance(asked, Event):
                left = None if until is None else max(0.0, until - time.monotonic())
                return self.waits.wait(asked.base, asked.base + b"\0", asked.after, left)
            if asked.attempt == 0:
                deadline = time.monotonic() + self._limit_s
            else:
                pause = pause_before(asked.attempt, len(self._client.endpoints))
                if time.monotonic() + pause >= deadline:
                    raise no_answer(self._client, self._limit_s, cause)
                time.sleep(pause)
            if self._closed:
                raise StoreError(f"the connection to {self.where} was closed")
            self._check()
            try:
                return self._client.call(asked.path, asked.body, deadline - time.monotonic())
            except NoAnswer as e:
                cause = e
                raise

        slot = self._take()
        try:
            return drive(begin(Operations(self._root, slot, self._fence)), perform)
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
