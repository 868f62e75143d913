"""The queue of background calls: scheduled on all ranks, finalized once all have finished.

    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(save, (state,), [commit]))
    ...                                          # training continues
    queue.maybe_finalize_async_calls()           # from time to time; never waits
    queue.close()                                # waits for the remaining calls

The ledger decides how a call ends, once for all ranks (`coordination/call_ledger.py`). A thread
(`reporter.py`) tells the ledger of the ends of processes. This file is the main thread's side: it
reads the ledger, finalizes the oldest call first, and raises the errors of failed calls.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple

from outlast.async_checkpoint.calls.reporter import Reporter, Verdicts
from outlast.async_checkpoint.calls.runners import ForkRunner, Outcome, WorkerRunner, name_of
from outlast.async_checkpoint.policies import FailurePolicy
from outlast.coordination.call_ledger import CallLedger, Verdict, connect_ledger
from outlast.coordination.collectives import least, raise_together, rank_of
from outlast.errors import AsyncCallError
from outlast.system.arguments import Duration, as_int, as_wait
from outlast.system.error_text import describe

log = logging.getLogger("outlast.async_checkpoint")

_STORE_S = 10.0
"""How long `close()` waits for the store, in seconds."""


class AsyncRequest(NamedTuple):
    """A background function, and functions to run when all ranks have finished it.

    Attributes:
        async_fn: runs in another process; `None` where this rank has nothing to do.
        async_fn_args: its arguments.
        finalize_fns: run in this process, in order, after `async_fn` has finished on all ranks.
        async_fn_kwargs: its keyword arguments.
        is_frozen: whether no more finalize functions can be added.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 - read, and never written
    is_frozen: bool = False

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Appends a finalize function.

        Raises:
            RuntimeError: if the request is frozen.
        """
        if self.is_frozen:
            raise RuntimeError("the request is frozen: no finalize function can be added")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """The same request, frozen."""
        return self._replace(is_frozen=True)

    def execute_sync(self) -> None:
        """Does the same work synchronously. Call it on all ranks of the default process group, if
        there is one: they wait for each other before the finalize functions.

        Raises:
            Exception: the error of `async_fn`, on the rank where it failed.
            AsyncCallError: on the other ranks. Nothing is finalized on any rank.
        """
        error: Exception | None = None
        try:
            if self.async_fn is not None:
                self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)
        except Exception as e:  # noqa: BLE001 - the other ranks must learn of it first
            error = e
        raise_together(error, f"{name_of(self.async_fn)} failed", rank_of(None))
        for fn in self.finalize_fns:
            fn()


class AsyncCallsQueue:
    """Background calls of a group of ranks. All ranks schedule the same calls in the same order.

    Use it in one thread. A `with` block closes it at its end, and aborts it if the block raises.

    Args:
        persistent: run all calls in one process, one after the other; functions and arguments are
            pickled. By default each call is a fork of this process.
        group: the ranks; the default process group, or this process alone if there is none.
        on_failure: what to do when a call fails: raise `AsyncCallError`, or apply a policy, which
            may ignore the failure.
        max_unfinalized: how many calls may be in flight; scheduling one more waits for the
            oldest. `None` for no limit.
        nice: niceness of the background processes, 0 to 19.

    Raises:
        TypeError: if `max_unfinalized` or `nice` is not an integer.
        ValueError: if `max_unfinalized` is below 1, or `on_failure` is neither.
    """

    def __init__(
        self,
        persistent: bool = False,
        group: Any = None,
        *,
        on_failure: Literal["raise"] | FailurePolicy = "raise",
        max_unfinalized: int | None = None,
        nice: int = 10,
    ) -> None:
        if max_unfinalized is not None:
            max_unfinalized = as_int("max_unfinalized", max_unfinalized, at_least=1)
        if on_failure != "raise" and not isinstance(on_failure, FailurePolicy):
            raise ValueError(f"on_failure must be 'raise' or a FailurePolicy, not {on_failure!r}")
        nice = as_int("nice", nice, at_least=0)
        self._group = group
        self._policy = None if isinstance(on_failure, str) else on_failure
        self._max_unfinalized = max_unfinalized
        self._make_runner = partial(WorkerRunner if persistent else ForkRunner, nice=nice)
        self._next_index = 0
        self._calls: deque[_PendingCall] = deque()
        self._failed_before: deque[AsyncCallError] = deque()  # to be raised at the next check
        self._ledger: CallLedger | None = None
        self._reporter: Reporter | None = None
        self._verdicts: Verdicts | None = None
        self._closed = False
        self._abandon: weakref.finalize[Any, Any] | None = None

    # -- what users call -----------------------------------------------------------------------

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Starts a request's function in the background. Called on all ranks, in the same order.

        An earlier failure does not prevent this; the next check raises it. So the ranks stay in
        step, whichever of them sees the failure first. If this method raises `TypeError`,
        `AsyncCallError` or `OSError`, the call has failed for all ranks; later calls continue.

        Returns:
            The index of the call: 0, 1, 2, ...

        Raises:
            TypeError: if the function cannot be pickled for a persistent worker; names it.
            AsyncCallError: if another rank has scheduled a different function as this call.
            OSError: if the system cannot start another process.
            ValueError: if the queue is closed.
            StoreError: if the store cannot be reached.
        """
        request = async_request
        ledger, reporter = self._open()
        if self._max_unfinalized is not None:
            while len(self._calls) >= self._max_unfinalized:
                self._settle_oldest(None)
        name, finalize_fns = name_of(request.async_fn), tuple(request.finalize_fns)
        call = _PendingCall(self._next_index, name, finalize_fns)
        self._next_index += 1
        self._calls.append(call)
        try:
            if request.async_fn is not None:
                ledger.round(call.index).announce(call.name)
            reporter.start(
                call.index,
                call.name,
                request.async_fn,
                request.async_fn_args,
                request.async_fn_kwargs,
            )
        except BaseException as e:
            # Raised here; the other ranks read it from the ledger.
            reporter.report(call.index, call.name, Outcome.of(e))
            reporter.leave(call.index)
            self._calls.remove(call)
            raise
        return call.index

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = True) -> list[int]:
        """Finalizes, oldest first, every call that all ranks have finished.

        Args:
            blocking: whether to wait for all calls.
            no_dist: read the ledger only; ranks may finalize a call at different checks. With
                `False` all ranks check together, by a small all-reduce, and finalize the same
                calls.

        Returns:
            The indices of the calls that were finalized.

        Raises:
            AsyncCallError: if a call has failed on any rank, or a finalize function on this one;
                names call, rank, host and cause. Earlier calls are finalized, this one is not, and
                later ones are finalized by the next check.
            StoreError: if the store cannot be reached.
        """
        finalized: list[int] = []
        if blocking:
            for call in tuple(self._calls):  # an abort in another thread empties it
                if not self._closed:
                    self._known().wait(call.index, None)
        end = self._decided_until()
        if not no_dist:
            end = least(end, self._group)
        if self._failed_before:
            raise self._failed_before.popleft()
        while self._calls and self._calls[0].index < end:
            call = self._calls[0]
            verdict = self._known().look(call.index)
            assert verdict is not None
            if self._settle(call, verdict):
                finalized.append(call.index)
            elif self._failed_before:
                raise self._failed_before.popleft()
        return finalized

    @property
    def async_calls(self) -> deque[Any]:
        """The calls that are not finalized, oldest first. Each has an `index` and a `name`."""
        return self._calls

    @property
    def call_idx(self) -> int:
        """The index of the last call; -1 before the first."""
        return self._next_index - 1

    def get_num_unfinalized_calls(self) -> int:
        """The number of scheduled calls that are neither finalized nor known to have failed."""
        return len(self._calls)

    def close(self, timeout: Duration | None = None) -> None:
        """Waits for all calls, finalizes them, and ends the background processes.

        Args:
            timeout: how long to wait; unfinished calls are then dropped, as by `abort`.

        Raises:
            AsyncCallError: the first error, if a call has failed or did not finish in time. The
                queue is closed anyway.
        """
        if self._closed:
            return
        limit = as_wait("timeout", timeout)
        deadline = None if limit is None else time.monotonic() + limit.total_seconds()
        try:
            while self._calls and self._settle_oldest(_left(deadline)):
                pass
            if self._calls:
                assert self._reporter is not None
                cause = f"it was not finished within the {limit} that close() had"
                self._reporter.drop(_names(self._calls), cause)
                # Each call gets a verdict as soon as the store has one. If all ranks have finished
                # a call meanwhile, it is finalized on all of them.
                while self._calls and self._settle_oldest(_STORE_S):
                    pass
        except BaseException:
            self.abort()
            raise
        reporter, left = self._reporter, [f"{call.index} ({call.name})" for call in self._calls]
        self._end("the queue was closed")
        if reporter is not None:
            reporter.join(_STORE_S)
        if left:
            self._failed_before.append(
                AsyncCallError(f"the store did not say how these calls ended: {', '.join(left)}")
            )
        if self._failed_before:
            raise self._failed_before.popleft()

    def abort(self) -> None:
        """Kills and drops the calls in flight, for all ranks; for a restart in place.

        A call that all ranks have finished stays finished: other ranks may finalize it, this one
        does not. Does not wait for other ranks, the store or a process, and may be called at any
        time, more than once. The queue is closed.
        """
        if self._closed:
            return
        self._end("the queue was aborted")

    def __enter__(self) -> AsyncCallsQueue:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    # -- private -------------------------------------------------------------------------------

    def _open(self) -> tuple[CallLedger, Reporter]:
        if self._closed:
            raise ValueError("this AsyncCallsQueue is closed: create a new one")
        if self._ledger is None:
            self._ledger = connect_ledger("async_calls", self._group)
        if self._reporter is None:
            self._verdicts = Verdicts(self._ledger)
            self._reporter = Reporter(self._make_runner, self._ledger, self._verdicts)
            self._abandon = weakref.finalize(self, _abandon, self._reporter, self._calls)
        return self._ledger, self._reporter

    def _known(self) -> Verdicts:
        assert self._verdicts is not None, "there is a call"
        return self._verdicts

    def _decided_until(self) -> int:
        """The index of the oldest call without a verdict."""
        for call in self._calls:
            if self._known().look(call.index) is None:
                return call.index
        return self._next_index

    def _settle_oldest(self, timeout: float | None) -> bool:
        """Waits for the oldest call and settles it. Returns whether there was a verdict in time."""
        call = self._calls[0]
        verdict = self._known().wait(call.index, timeout)
        if verdict is not None:
            self._settle(call, verdict)
        return verdict is not None

    def _settle(self, call: _PendingCall, verdict: Verdict) -> bool:
        """Finalizes the oldest call if it is done. Returns whether it was done and finalized;
        otherwise the error is kept in `_failed_before`, unless the policy ignores it.
        """
        assert self._reporter is not None
        self._calls.popleft()  # before its functions run: one that raises is not run again
        self._reporter.leave(call.index)
        self._known().settled(call.index)
        error = None if verdict.failure is None else verdict.failure.to_error()
        if error is None:
            error = call.finalize()
        if error is None:
            if self._policy is not None:
                self._policy.succeeded()
            return True
        if self._policy is None or not self._policy.failed(error):
            self._failed_before.append(error)
        return False

    def _end(self, why: str) -> None:
        self._closed = True
        if self._abandon is not None:
            self._abandon.detach()
        if self._reporter is not None:
            self._reporter.end(_names(self._calls), why)
        self._calls.clear()
        self._ledger = self._reporter = self._verdicts = None  # drops the connections too


@dataclasses.dataclass(frozen=True)
class _PendingCall:
    """A call neither finalized nor failed, and the finalize functions that it began with."""

    index: int
    name: str
    finalize_fns: tuple[Callable[[], Any], ...]

    def finalize(self) -> AsyncCallError | None:
        """Calls the finalize functions in order, up to one that raises: its error is returned."""
        for fn in self.finalize_fns:
            try:
                fn()
            except Exception as e:  # noqa: BLE001 - raised by the queue, with its cause
                error = AsyncCallError(
                    f"finalize function {name_of(fn)} of background call {self.index} "
                    f"({self.name}) failed on this rank: {describe(e)}"
                )
                error.__cause__ = e
                return error
        return None


def _names(calls: Iterable[_PendingCall]) -> dict[int, str]:
    return {call.index: call.name for call in calls}


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _abandon(reporter: Reporter, calls: deque[_PendingCall]) -> None:
    """Drops the calls of a queue that was never closed: it was collected, or the program ends."""
    if calls:
        what = ", ".join(f"{call.index} ({call.name})" for call in calls)
        log.warning("background calls dropped because their queue was never closed: %s", what)
    reporter.end(_names(calls), "its queue was never closed")
