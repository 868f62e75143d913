"""The thread of a queue that reports the end of background processes to the other ranks.

It waits for events: the end of a process, or a wake-up from the main thread. So the other ranks see
this rank's outcome even while its main thread is busy, in a long step or in a collective.

The same thread has the ledger forget a call once this rank's outcome has been reported *and* the
main thread no longer needs the call: nothing may be reported after that.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from outlast.async_checkpoint.calls.runner_protocol import Outcome, Runner
from outlast.coordination.call_ledger import CallFailure, CallLedger
from outlast.errors import AsyncCallError, OutlastError, StoreError
from outlast.system.waiting import readable

log = logging.getLogger("outlast.async_checkpoint")


class Reporter:
    """Owns a runner. The public methods are for the main thread.

    Args:
        on_error: called in the reporter's thread if outcomes can no longer be reported, because the
            store cannot be reached or the thread has failed.
        before_forgetting: called in the reporter's thread with the index of a call that has a
            verdict, before its keys may be deleted.
    """

    def __init__(
        self,
        runner: Runner,
        ledger: CallLedger,
        on_error: Callable[[OutlastError], None],
        before_forgetting: Callable[[int], None],
    ) -> None:
        self._runner = runner
        self._ledger = ledger
        self._on_error = on_error
        self._before_forgetting = before_forgetting
        self._guard = threading.Lock()  # guards everything below, and the runner
        self._names: dict[int, str] = {}  # of calls without a reported outcome
        self._outcomes: deque[tuple[int, Outcome]] = deque()  # to be reported
        self._left: set[int] = set()  # the main thread no longer needs them
        self._drop: tuple[dict[int, str], str] | None = None
        self._given_up: tuple[dict[int, str], str] | None = None
        self._ending = False
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="outlast-calls", daemon=True)
        self._thread.start()

    def start(
        self,
        index: int,
        name: str,
        fn: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Starts a call; raises what `Runner.start` raises. A call without a function is done."""
        with self._guard:
            if fn is None:
                self._outcomes.append((index, Outcome()))
            else:
                self._runner.start(index, fn, args, kwargs)
            self._names[index] = name
        self._wake_up()

    def report(self, index: int, name: str, outcome: Outcome) -> None:
        """Reports an outcome that does not come from a background process."""
        with self._guard:
            self._names[index] = name
            self._outcomes.append((index, outcome))
        self._wake_up()

    def leave(self, index: int) -> None:
        """Marks that the main thread no longer needs the call."""
        with self._guard:
            self._left.add(index)
        self._wake_up()

    def drop(self, calls: Mapping[int, str], cause: str) -> None:
        """Kills the calls in flight, and fails these calls (name by index) on all ranks, except
        those that all ranks have finished. Waits neither for the processes nor for the store.
        """
        with self._guard:
            earlier, first_cause = self._drop or ({}, cause)  # not seen by the thread yet
            self._drop = ({**calls, **earlier}, first_cause)
            self._runner.kill()
        self._wake_up()

    def end(self) -> None:
        """Ends the thread after it has reported all outcomes. Processes that still run are killed:
        their calls have failed on another rank. Does not wait.
        """
        with self._guard:
            self._ending = True
        self.drop({}, "the queue was closed")

    def give_up(self, calls: Mapping[int, str], cause: str) -> None:
        """Makes the thread do `leave` for these calls, `drop` and `end`. Takes no lock: it may be
        called where the program was interrupted, and by the garbage collector in any thread,
        including the reporter's.
        """
        self._given_up = (dict(calls), cause)
        self._wake_up()

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the end of the thread, at most `timeout` seconds; returns whether it ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _wake_up(self) -> None:
        try:
            self._wake.send(b"w")
        except (BlockingIOError, OSError):
            return  # the thread is awake already, or has ended

    # -- in the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._step():
                self._wait()
        except Exception as e:
            # A bug, or a system out of resources: the main thread must not wait for outcomes.
            log.exception("the thread that reports background calls has failed")
            self._on_error(AsyncCallError(f"background calls are not reported any more: {e!r}"))
        finally:
            with self._guard:
                self._runner.close()
            self._wake.close()
            self._woken.close()

    def _wait(self) -> None:
        with self._guard:
            descriptors = self._runner.descriptors()
        # If the main thread starts another call now, it wakes this thread.
        readable(self._woken.fileno(), *descriptors)
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            return

    def _step(self) -> bool:
        """Reports all outcomes so far. Returns whether the thread must end."""
        if self._given_up is not None:
            (calls, why), self._given_up = self._given_up, None
            with self._guard:
                self._left.update(calls)
            self.drop(calls, why)
            self.end()
        with self._guard:
            self._outcomes.extend(self._runner.collect())
            outcomes, self._outcomes = list(self._outcomes), deque()
            dropped: dict[int, str] = {}
            cause = ""
            if self._drop is not None:
                # Calls that have succeeded count; all others, killed or not, are dropped.
                (dropped, cause), self._drop = self._drop, None
                outcomes = [(index, outcome) for index, outcome in outcomes if not outcome.cause]
                dropped = dropped | self._names
            names = dict(self._names)
            ending = self._ending
        for index, outcome in outcomes:
            if index in names:  # otherwise it was given up while it was being scheduled
                self._report(index, names[index], outcome)
        for index, name in dropped.items():
            # Including a call that this rank has just finished: others may not have, and nothing
            # waits for them now. If all have, this claim comes too late and changes nothing.
            self._report(index, name, Outcome(cause))
        with self._guard:
            for index in [*dropped, *(index for index, _ in outcomes)]:
                self._names.pop(index, None)
            finished = sorted(self._left - self._names.keys())
            self._left -= set(finished)
        for index in finished:
            self._before_forgetting(index)
            self._try(self._ledger.forget, index)
        return ending and not self._names

    def _report(self, index: int, name: str, outcome: Outcome) -> None:
        if outcome.cause is None:
            self._try(self._ledger.finish, index)
            return
        rank = self._ledger.rank
        failure = CallFailure.here(index, name, rank, outcome.cause, outcome.traceback)
        self._try(self._ledger.fail, index, failure)

    def _try(self, operation: Callable[..., Any], *arguments: Any) -> None:
        try:
            operation(*arguments)
        except StoreError as e:
            self._on_error(e)
