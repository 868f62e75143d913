"""Runs one background call at a time, and reports whether it is done, on this rank or on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from outlast.async_checkpoint.calls.request import name_of
from outlast.async_checkpoint.calls.runners import ForkRunner, Outcome, Runner, WorkerRunner
from outlast.coordination.call_ledger import CallFailure
from outlast.coordination.collectives import least, raise_together, rank_of
from outlast.system.waiting import readable

__all__ = ["DistributedAsyncCaller"]

_NONE: Mapping[str, Any] = MappingProxyType({})


class DistributedAsyncCaller:
    """Runs one function at a time in a background process. Most programs want `AsyncCallsQueue`,
    which takes many calls and finalize functions, and does not need the ranks to be in step.

    Args:
        persistent: whether to start one process and send it each call, pickled; otherwise each call
            is a fork.
        group: the ranks; the default process group, or this process alone if there is none.
        nice: niceness of the background process, 0 to 19.
    """

    def __init__(self, persistent: bool = False, group: Any = None, *, nice: int = 10) -> None:
        self._group = group
        self._runner: Runner = WorkerRunner(nice) if persistent else ForkRunner(nice)
        self._index = -1
        self._name = ""
        self._running = False
        self._open = False  # whether the outcome of a call is still to be returned
        self._outcome = Outcome()

    def schedule_async_call(
        self,
        async_fn: Callable[..., Any] | None,
        save_args: tuple[Any, ...],
        save_kwargs: Mapping[str, Any] = _NONE,
    ) -> None:
        """Starts `async_fn` in the background; does nothing for `None`. Called on all ranks.

        Raises:
            RuntimeError: if the previous call is not known to be done.
            TypeError: if the function cannot be pickled for a persistent worker; names it.
            OSError: if the system cannot start another process.
        """
        if self._open:
            raise RuntimeError(f"{self._name} still runs, or was never asked whether it is done")
        self._index += 1
        self._name = name_of(async_fn)
        self._outcome = Outcome()
        if async_fn is not None:
            self._runner.start(self._index, async_fn, save_args, save_kwargs)
            self._running = self._open = True

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
        ended = self._look(blocking)
        if not no_dist and not least(int(ended), self._group):
            return False
        if not ended:
            return False
        self._open = False
        outcome, self._outcome = self._outcome, Outcome()
        error = None
        rank = rank_of(self._group)
        if outcome.cause is not None:
            failure = CallFailure.here(
                self._index, self._name, rank, outcome.cause, outcome.traceback
            )
            error = failure.to_error()
        if not no_dist:
            raise_together(error, f"background call {self._index} failed", rank, self._group)
        elif error is not None:
            raise error
        return True

    def close(self) -> None:
        """Kills the process, if there is one, and releases its resources."""
        self._runner.close()
        self._running = self._open = False

    def _look(self, blocking: bool) -> bool:
        while self._running:
            for index, outcome in self._runner.collect():
                if index == self._index:
                    self._outcome = outcome
                    self._running = False
            if not self._running or not blocking:
                break
            readable(*self._runner.descriptors())
        return not self._running
