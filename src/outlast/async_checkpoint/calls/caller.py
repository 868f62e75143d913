"""Runs one background call at a time, and reports whether it is done, on this rank or on all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import psutil

from outlast.async_checkpoint.calls.queue import AsyncCallsQueue, AsyncRequest
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.collectives import least, raise_together, rank_of
from outlast.coordination.stores.store import MemoryStore
from outlast.errors import AsyncCallError

log = logging.getLogger("outlast.async_checkpoint")

_NONE: Mapping[str, Any] = MappingProxyType({})


class DistributedAsyncCaller:
    """Runs one function at a time in a background process. Most programs want `AsyncCallsQueue`,
    which takes many calls and finalize functions, and does not need the ranks to be in step.

    Args:
        persistent: whether to start one process and send it each call, pickled; otherwise each call
            is a fork.
        group: the ranks; the default process group, or this process alone if there is none.
        nice: niceness of the background process, 0 to 19.

    Attributes:
        start_time: when the current call was started, by `time.time()`; `None` if there is none.
    """

    def __init__(self, persistent: bool = False, group: Any = None, *, nice: int = 10) -> None:
        self._group = group
        self._options: dict[str, Any] = {"persistent": persistent, "nice": nice}
        self._queue: AsyncCallsQueue | None = None  # of this rank alone
        self._index = -1
        self._error: AsyncCallError | None = None
        self.start_time: float | None = None

    def schedule_async_call(
        self,
        async_fn: Callable[..., Any] | None,
        save_args: tuple[Any, ...],
        save_kwargs: Mapping[str, Any] | None = _NONE,
    ) -> None:
        """Starts `async_fn` in the background; does nothing for `None`. Called on all ranks. If an
        earlier call is not done, the current one is done when both are.

        Raises:
            TypeError: if the function cannot be pickled for a persistent worker; names it.
            OSError: if the system cannot start another process.
        """
        if self._queue is None:
            self._queue = AsyncCallsQueue(**self._options)
            self._queue._ledger = CallLedger(MemoryStore(), "caller", rank_of(self._group), 1)
        self._index += 1
        if async_fn is not None:
            self._queue.schedule_async_request(
                AsyncRequest(async_fn, tuple(save_args), [], dict(save_kwargs or {}))
            )
            self.start_time = time.time()

    @property
    def process(self) -> psutil.Process | None:
        """The process of the current call; `None` if there is none, or it has ended."""
        reporter = None if self._queue is None else self._queue._reporter
        pid = None if reporter is None or self.start_time is None else reporter.runner.pid
        try:
            return None if pid is None else psutil.Process(pid)
        except psutil.NoSuchProcess:
            return None

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = True) -> bool:
        """Whether the call has succeeded. True before the first one.

        Args:
            blocking: whether to wait for its end.
            no_dist: ask only this rank's process; with `False` all ranks ask together and get the
                same answer: true when all have finished.

        Raises:
            AsyncCallError: if the call has failed; with `no_dist=False`, if it has failed on any
                rank, and then on all ranks. Raised once; the next call can then be scheduled.
        """
        ended = True
        if self._queue is not None:
            try:
                self._queue.maybe_finalize_async_calls(blocking)
            except AsyncCallError as e:
                if self._error is not None:
                    log.error("another background call failed, too: %s", e)  # one is raised
                self._error = self._error or e
                if blocking and self._queue.get_num_unfinalized_calls():
                    return self.is_current_async_call_done(blocking, no_dist)
            ended = self._queue.get_num_unfinalized_calls() == 0
        if not no_dist:
            ended = bool(least(int(ended), self._group))
        if not ended:
            return False
        self.start_time = None
        error, self._error = self._error, None
        if not no_dist:
            what = f"background call {self._index} failed"
            raise_together(error, what, rank_of(self._group), self._group)
        elif error is not None:
            raise error
        return True

    def close(self) -> None:
        """Kills the process, if there is one, and releases its resources."""
        queue, self._queue, self.start_time = self._queue, None, None
        if queue is not None:
            reporter = queue._reporter
            queue.abort()
            if reporter is not None:
                reporter.join()
