"""The threads of a queue: one reports ends of processes to other ranks, others wait for verdicts.

So the other ranks see this rank's outcome even while its main thread is busy, in a long step or in
a collective. The reporter has the ledger forget a call once this rank's outcome has been reported
*and* the main thread no longer needs the call: nothing may be reported after that.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from outlast.async_checkpoint.calls.runners import Ended, Outcome, Runner
from outlast.coordination.call_ledger import CallFailure, CallLedger, Verdict
from outlast.coordination.waits import set_working, waits
from outlast.errors import AsyncCallError, OutlastError, StoreError
from outlast.system.parallel import ThreadedWait, start_thread

log = logging.getLogger("outlast.async_checkpoint")

_STORE_S = 10.0
"""How long to wait for a store that should answer at once."""


class Verdicts:
    """The verdicts of a ledger, for the main thread: a look, or a wait that another thread can end.
    If this rank cannot report any more, there may never be a verdict, and the connection that waits
    for it may be intact. So a thread waits for the store, and the main thread for that thread.

    One thread asks; any other may call `give_up`. Without the store, both raise `StoreError`.
    """

    def __init__(self, ledger: CallLedger) -> None:
        self._ledger = ledger
        self._known: dict[int, Verdict] = {}  # a verdict never changes
        # The wait for the verdict with this index. It cannot be cancelled: it continues until the
        # verdict is there or the store is gone, so a later call joins the same wait.
        self._wait: tuple[int, ThreadedWait[Verdict]] | None = None
        self._error: OutlastError | None = None

    def look(self, index: int) -> Verdict | None:
        self._raise()
        if index not in self._known:
            verdict = self._ledger.round(index).verdict()
            if verdict is None:
                return None
            self._known[index] = verdict
        return self._known[index]

    def wait(self, index: int, timeout: float | None) -> Verdict | None:
        """Waits for the verdict; returns `None` after `timeout` seconds."""
        verdict = self.look(index)
        if verdict is not None or timeout == 0.0:
            return verdict
        if self._wait is None or self._wait[0] != index:
            self._wait = (
                index,
                ThreadedWait(
                    partial(self._ledger.round(index).await_verdict, None), "outlast-verdict"
                ),
            )
        wait = self._wait[1]
        # `give_up` sets the error, then looks for a wait; here the order is reversed.
        self._raise()
        with waits():
            is_over = wait.over.wait(timeout)
        if not is_over:
            return None
        self._known[index] = verdict = wait.result()
        return verdict

    def settled(self, index: int) -> None:
        """Forgets a verdict that will not be asked for again."""
        self._known.pop(index, None)

    def await_wait(self, index: int) -> None:
        """From any thread: returns when nothing waits for this verdict, which exists by now.

        Call it before the ledger forgets the call: a wait that was given up, or overtaken by a
        look, continues until it has read the verdict: forever, if that were deleted first.
        """
        wait = self._wait
        if wait is not None and wait[0] == index:
            wait[1].join(_STORE_S)  # takes one answer of the store

    def give_up(self, error: OutlastError) -> None:
        """Ends all waits, from any thread: this rank cannot report, so there may be no verdict."""
        self._error = error
        wait = self._wait
        if wait is not None:
            wait[1].abandon(error)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


class Reporter:
    """Owns a runner. The public methods are for the main thread; those that take no lock may also
    be called where the program was interrupted, and by the garbage collector in any thread.
    """

    def __init__(
        self, make_runner: Callable[[Ended], Runner], ledger: CallLedger, verdicts: Verdicts
    ) -> None:
        self.runner = make_runner(self._ended)
        self._ledger, self._verdicts = ledger, verdicts
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # for the thread
        # Of the thread:
        self._names: dict[int, str] = {}  # of calls without a reported outcome
        self._left: set[int] = set()  # the main thread no longer needs them
        self._ending = False
        self._thread = start_thread("outlast-calls", self._run)

    def start(
        self,
        index: int,
        name: str,
        fn: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Starts a call; raises what `Runner.start` raises. A call without a function is done."""
        if fn is None:
            self.report(index, name, Outcome())
            return
        self._work.put(lambda: self._names.update({index: name}))  # first: it may end at once
        self.runner.start(index, fn, args, kwargs)

    def report(self, index: int, name: str, outcome: Outcome) -> None:
        """Reports an outcome that does not come from a background process. Takes no lock."""
        self._work.put(lambda: self._report(index, name, outcome))

    def leave(self, index: int) -> None:
        """Marks that the main thread no longer needs the call. Takes no lock."""
        self._work.put(lambda: self._left.add(index))

    def drop(self, calls: Mapping[int, str], cause: str) -> None:
        """Kills the calls in flight, and fails these calls (name by index) on all ranks, except
        those that all ranks have finished. Waits for nothing, and takes no lock.
        """
        self._work.put(lambda: self._drop(calls, cause))

    def end(self, calls: Mapping[int, str], cause: str) -> None:
        """`drop` and `leave`, then the end of the thread and of all processes. Takes no lock."""
        left = dict(calls)

        def end() -> None:
            self._drop(left, cause)
            self._left.update(left)
            self._ending = True

        self._work.put(end)

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the end of the thread, at most `timeout` seconds; returns whether it ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _ended(self, index: int, outcome: Outcome) -> None:
        def report() -> None:
            if index in self._names:  # else it was dropped
                self._report(index, self._names[index], outcome)

        self._work.put(report)

    # -- in the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending or self._names:
                self._work.get()()
                set_working(self, bool(self._names))
                for index in sorted(self._left - self._names.keys()):
                    self._left.remove(index)
                    self._verdicts.await_wait(index)
                    self._try(self._ledger.round(index).forget)
        except Exception as e:
            # A bug, or a system out of resources: the main thread must not wait for outcomes.
            log.exception("the thread that reports background calls has failed")
            error = AsyncCallError(f"background calls are not reported any more: {e!r}")
            self._verdicts.give_up(error)
        finally:
            set_working(self, False)
            self.runner.close()

    def _drop(self, calls: Mapping[int, str], cause: str) -> None:
        self.runner.kill()
        # A call that this rank has just finished is dropped too: others may not have, and nothing
        # waits for them now. If all have, this claim comes too late and changes nothing.
        for index, name in {**calls, **self._names}.items():
            self._report(index, name, Outcome(cause))

    def _report(self, index: int, name: str, outcome: Outcome) -> None:
        self._names.pop(index, None)
        if outcome.cause is None:
            self._try(self._ledger.round(index).finish)
            return
        rank = self._ledger.rank
        failure = CallFailure.here(index, name, rank, outcome.cause, outcome.traceback)
        self._try(self._ledger.round(index).fail, failure)

    def _try(self, operation: Callable[..., Any], *arguments: Any) -> None:
        try:
            operation(*arguments)
        except StoreError as e:
            self._verdicts.give_up(e)
