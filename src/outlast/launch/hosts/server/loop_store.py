"""A store that the event loop of another thread performs: synchronous, for any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Protocol

from outlast.coordination.replicated.operations import Failed, Operation, OperationStore, Result
from outlast.coordination.stores.store import KeyTimeout
from outlast.errors import StoreError
from outlast.launch.hosts.server.combining import Upstream


class LoopThread(Protocol):
    """The thread whose event loop performs the operations."""

    def call(self, work: Callable[[], None]) -> bool:
        """Have the thread call `work`; `False` if it is over and will not."""

    def error(self) -> str:
        """Why this host may not act any more; empty while it may."""

    def stuck(self) -> bool:
        """Whether the thread cannot be expected to answer any more."""


def wait_for_call(thread: LoopThread, work: Callable[[], None]) -> None:
    """Have the thread call `work`, and return after that; at once if it is over."""
    done = threading.Event()

    def call() -> None:
        work()
        done.set()

    if thread.call(call):
        done.wait()


class LoopStore(OperationStore):
    """Every operation raises a `StoreError` as soon as the lease of this host is over, and those
    that are under way then.

    Args:
        upstream: performs the operations, in the thread.
        look_s: how often a caller that waits looks whether the thread is stuck.
    """

    def __init__(self, thread: LoopThread, upstream: Upstream, where: str, look_s: float) -> None:
        self._thread, self._upstream = thread, upstream
        self._where, self._look_s = where, look_s

    def perform(self, operation: Operation, timeout: float | None = None) -> Result:
        pending = _Pending()

        def begin() -> None:
            pending.handle = self._upstream.submit(operation, pending.finish)

        if not self._thread.call(begin):
            raise self._lost("it is closed")
        until = None if timeout is None else time.monotonic() + timeout
        while not pending.done.wait(self._patience_s(until)):
            if until is not None and time.monotonic() >= until:
                self._thread.call(lambda: self._upstream.cancel(pending.handle))
                value = self.read(operation.key)  # it may have appeared at the last moment
                if value is None:
                    raise KeyTimeout(f"no {operation.key!r} within {timeout} s at {self._where}")
                return value
            if self._thread.stuck():
                raise self._lost("the lease of this host is over, and its host service hangs")
        if isinstance(pending.result, Failed):
            raise self._lost(pending.result.reason)
        return pending.result

    def _patience_s(self, until: float | None) -> float:
        left_s = self._look_s if until is None else until - time.monotonic()
        return max(0.0, min(left_s, self._look_s))

    def _lost(self, reason: str) -> StoreError:
        why = self._thread.error() or reason
        return StoreError(f"the store of {self._where} cannot be reached: {why}")


class _Pending:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.result: Result = None
        self.handle: Hashable = None

    def finish(self, result: Result) -> None:
        self.result = result
        self.done.set()
