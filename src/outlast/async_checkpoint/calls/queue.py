"""The queue of background calls: scheduled on all ranks, finalized once all have finished.

    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(save, (state,), [commit]))
    ...                                          # training goes on
    queue.maybe_finalize_async_calls()           # now and then; never waits
    queue.close()                                # waits for what is left

How a call ends is decided once for all ranks, in the ledger (`call_ledger.py` says why it cannot be
seen differently on two of them). A background process that ends is seen, and told, by a thread
(`calls/reporter.py`). This file is the main thread's side: it looks at the ledger, calls the
finalize functions, oldest call first, and raises what has failed.
"""

from __future__ import annotations

import datetime
import time
import weakref
from collections import deque
from types import TracebackType
from typing import Any, Literal

from outlast.async_checkpoint.calls.finalizers import Call, abandon
from outlast.async_checkpoint.calls.fork_runner import ForkRunner
from outlast.async_checkpoint.calls.reporter import Watcher
from outlast.async_checkpoint.calls.request import AsyncRequest
from outlast.async_checkpoint.calls.runner_protocol import Outcome
from outlast.async_checkpoint.calls.verdicts import Verdicts
from outlast.async_checkpoint.calls.worker_runner import WorkerRunner
from outlast.async_checkpoint.failure_policy import FailurePolicy
from outlast.coordination.call_ledger import CallLedger, Verdict, connect_ledger
from outlast.coordination.collectives import least
from outlast.errors import AsyncCallError
from outlast.system.error_text import describe, traceback_text

__all__ = ["AsyncCallsQueue"]

_STORE_S = 10.0
"""How long `close()` waits for a store that should answer at once."""


class AsyncCallsQueue:
    """Background calls of a group of ranks. All ranks schedule the same calls in the same order.

    It belongs to the thread that made it. As a context manager it is closed at the end of the
    block, and aborted when the block raises.

    Args:
        persistent: whether one process, started once, runs all calls one after the other; their
            functions and arguments are pickled. Otherwise each call is a fork of this process.
        group: the ranks; the default process group, or this process alone if there is none.
        on_failure: what to do about a failed call: raise `AsyncCallError`, or a policy that may
            let it pass.
        max_unfinalized: how many calls may be in flight; scheduling one more waits for the
            oldest. `None` for any number.
        nice: niceness of the background processes, 0 to 19.

    Raises:
        ValueError: for a `max_unfinalized` below 1, or an `on_failure` that is none of these.
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
        if max_unfinalized is not None and max_unfinalized < 1:
            raise ValueError(f"max_unfinalized is {max_unfinalized}, and must be 1 or more")
        if on_failure != "raise" and not isinstance(on_failure, FailurePolicy):
            raise ValueError(f"on_failure is {on_failure!r}: 'raise' or a FailurePolicy")
        self._group = group
        self._policy = None if isinstance(on_failure, str) else on_failure
        self._max_unfinalized = max_unfinalized
        self._runner = WorkerRunner(nice) if persistent else ForkRunner(nice)
        self._next_index = 0
        self._calls: deque[Call] = deque()
        self._failed_before: deque[AsyncCallError] = deque()  # to be raised at the next check
        self._ledger: CallLedger | None = None
        self._watcher: Watcher | None = None
        self._verdicts: Verdicts | None = None
        self._closed = False
        self._abandon: weakref.finalize[Any, Any] | None = None

    # -- what users call -----------------------------------------------------------------------

    def schedule_async_request(self, request: AsyncRequest) -> int:
        """Starts a request's function in the background. Called on all ranks, in one order.

        What failed before does not keep a call from being scheduled: it is raised at the next
        check. So the ranks stay in step, whichever of them hears of a failure first. After a
        `TypeError`, `AsyncCallError` or `OSError` of this method the call has failed for all
        ranks; later calls go on.

        Returns:
            The index of the call: 0, 1, 2, ...

        Raises:
            TypeError: naming the function, if it cannot be given to a persistent worker.
            AsyncCallError: if another rank has scheduled another function as this call.
            OSError: if the system has no room for another process.
            RuntimeError: if the queue is closed.
            StoreError: when the other ranks cannot be reached.
        """
        ledger, watcher = self._open()
        if self._max_unfinalized is not None:
            while len(self._calls) >= self._max_unfinalized:
                self._settle_oldest(None)
        call = Call.of(request, self._next_index)
        self._next_index += 1
        self._calls.append(call)
        try:
            if request.async_fn is not None:
                ledger.announce(call.index, call.name)
            watcher.start(
                call.index,
                call.name,
                request.async_fn,
                request.async_fn_args,
                request.async_fn_kwargs,
            )
        except BaseException as e:
            # It is raised here; the others hear of it from the ledger.
            watcher.say(call.index, call.name, Outcome(describe(e), traceback_text(e)))
            watcher.leave(call.index)
            self._calls.remove(call)
            raise
        return call.index

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = True) -> list[int]:
        """Finalizes, oldest first, every call that all ranks have finished.

        Args:
            blocking: waits for all calls.
            no_dist: looks at the ledger, which needs no other rank's presence; ranks may finalize
                a call at different checks. With `False` all ranks must make this check, in step:
                one small all-reduce has the same calls finalized at the same check on all of them.

        Returns:
            The indices of the calls that were finalized.

        Raises:
            AsyncCallError: when a call has failed on any rank, or a finalize function has on this
                one; naming call, rank, host and cause. Calls before it are finalized, it is not,
                and later ones are at the next check.
            StoreError: when the other ranks cannot be reached.
        """
        finalized: list[int] = []
        if blocking:
            for call in self._calls:
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

    def get_num_unfinalized_calls(self) -> int:
        """How many calls were scheduled and are neither finalized nor known to have failed."""
        return len(self._calls)

    def close(self, timeout: datetime.timedelta | None = None) -> None:
        """Waits for all calls, finalizes them, and gives everything back.

        Args:
            timeout: how long to wait; then what is left is dropped, as by `abort`.

        Raises:
            AsyncCallError: when a call has failed, or was not finished in time; the first of
                several, and the queue is closed all the same.
        """
        if self._closed:
            return
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        try:
            while self._calls and self._settle_oldest(_left(deadline)):
                pass
            if self._calls:
                self._drop(f"it was not finished within the {timeout} that close() had")
                # Each has its verdict now, as soon as the store has it; and it may be that all
                # ranks have finished it after all: then it is finalized on all of them.
                while self._calls and self._settle_oldest(_STORE_S):
                    pass
        except BaseException:
            self.abort()
            raise
        watcher, left = self._watcher, [f"{call.index} ({call.name})" for call in self._calls]
        self._end()
        if watcher is not None:
            watcher.join(_STORE_S)
        if left:
            self._failed_before.append(
                AsyncCallError(f"the store did not say how these calls ended: {', '.join(left)}")
            )
        if self._failed_before:
            raise self._failed_before.popleft()

    def abort(self) -> None:
        """Kills what is in flight and drops it, for all ranks; for a restart in place.

        A call that all ranks had finished before stays finished: other ranks may finalize it,
        this one does not. Does not wait, for other ranks, the store or a process, and may be
        called at any time, more than once. The queue is closed.
        """
        if self._closed:
            return
        if self._watcher is not None:
            calls = {call.index: call.name for call in self._calls}
            self._watcher.give_up(calls, "the queue was aborted")
            self._watcher = None
        self._end()

    def __enter__(self) -> AsyncCallsQueue:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    # -- private -------------------------------------------------------------------------------

    def _open(self) -> tuple[CallLedger, Watcher]:
        if self._closed:
            raise RuntimeError("the queue is closed")
        if self._ledger is None:
            self._ledger = connect_ledger("async_calls", self._group)
        if self._watcher is None:
            self._verdicts = Verdicts(self._ledger)
            self._watcher = Watcher(
                self._runner, self._ledger, self._verdicts.give_up, self._verdicts.await_wait
            )
            self._abandon = weakref.finalize(self, abandon, self._watcher, self._calls)
        return self._ledger, self._watcher

    def _known(self) -> Verdicts:
        assert self._verdicts is not None, "there is a call"
        return self._verdicts

    def _decided_until(self) -> int:
        """The index of the oldest call that is not decided."""
        for call in self._calls:
            if self._known().look(call.index) is None:
                return call.index
        return self._next_index

    def _settle_oldest(self, timeout: float | None) -> bool:
        """Waits for the oldest call, and settles it. Returns whether it was decided in time."""
        call = self._calls[0]
        verdict = self._known().wait(call.index, timeout)
        if verdict is not None:
            self._settle(call, verdict)
        return verdict is not None

    def _settle(self, call: Call, verdict: Verdict) -> bool:
        """Finalizes the oldest call, if it is done. Returns whether that was so, and went well;
        otherwise the error waits in `_failed_before`, unless the policy lets it pass.
        """
        assert self._watcher is not None
        self._calls.popleft()  # before its functions run: one that raises is not run again
        self._watcher.leave(call.index)
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

    def _drop(self, cause: str) -> None:
        if self._watcher is not None:
            self._watcher.drop({call.index: call.name for call in self._calls}, cause)

    def _end(self) -> None:
        self._closed = True
        if self._abandon is not None:
            self._abandon.detach()
        if self._watcher is not None:
            for call in self._calls:
                self._watcher.leave(call.index)
            self._watcher.end()
        self._calls.clear()
        self._ledger = self._watcher = self._verdicts = None  # and so its connections


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
