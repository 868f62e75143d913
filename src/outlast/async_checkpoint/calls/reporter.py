"""The one thread of a queue: sees background processes end, and tells the other ranks at once.

It waits for events only: a process's end, a word from the main thread. So other ranks hear of this
rank's part whatever its main thread is doing meanwhile, a long step or a collective say.

It is also who says to the ledger that a call can be forgotten: after this rank's outcome was said
*and* its main thread is through with the call, since nothing may be said of a call after that.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from outlast.async_checkpoint.calls.runner_protocol import Outcome, Runner
from outlast.coordination.call_failure import CallFailure
from outlast.coordination.call_ledger import CallLedger
from outlast.errors import AsyncCallError, OutlastError, StoreError
from outlast.system.waiting import readable

__all__ = ["Watcher"]

log = logging.getLogger("outlast.async_checkpoint")


class Watcher:
    """Owns a runner. Its methods are for the main thread.

    Args:
        runner: runs the calls.
        ledger: where outcomes are said.
        on_error: told, in the watcher's thread, why the other ranks do not hear of this one's
            outcomes any more: the store cannot be reached.
        before_forgetting: called in the watcher's thread with the index of a call that is decided,
            before its keys may be deleted.
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
        self._guard = threading.Lock()  # for all that follows, and for the runner
        self._names: dict[int, str] = {}  # of the calls whose outcome is not said
        self._outcomes: deque[tuple[int, Outcome]] = deque()  # to be said
        self._left: set[int] = set()  # the main thread is through with them
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
        """Starts a call; raises what `Runner.start` raises. Without a function it is done."""
        with self._guard:
            if fn is None:
                self._outcomes.append((index, Outcome()))
            else:
                self._runner.start(index, fn, args, kwargs)
            self._names[index] = name
        self._stir()

    def say(self, index: int, name: str, outcome: Outcome) -> None:
        """Has an outcome told to the other ranks that no background process had a part in."""
        with self._guard:
            self._names[index] = name
            self._outcomes.append((index, outcome))
        self._stir()

    def leave(self, index: int) -> None:
        """The main thread is through with the call."""
        with self._guard:
            self._left.add(index)
        self._stir()

    def drop(self, calls: Mapping[int, str], cause: str) -> None:
        """Kills what is in flight, and has these calls fail on all ranks, unless all have finished
        them. Waits neither for the processes nor for the store.

        Args:
            calls: index and name of those that this rank may have finished, but others not.
            cause: why.
        """
        with self._guard:
            earlier, first_cause = self._drop or ({}, cause)  # which the thread has not seen yet
            self._drop = ({**calls, **earlier}, first_cause)
            self._runner.kill()
        self._stir()

    def end(self) -> None:
        """Has the watcher end, once it has said what there is to say; what still runs is killed:
        its call has failed on another rank. Does not wait.
        """
        with self._guard:
            self._ending = True
        self.drop({}, "the queue was closed")

    def give_up(self, calls: Mapping[int, str], cause: str) -> None:
        """Does what `leave` of these calls, `drop` and `end` do, in the watcher's own time. Takes
        no lock: it may be called where the program was interrupted, and by the garbage collector
        in any thread, the watcher's too.
        """
        self._given_up = (dict(calls), cause)
        self._stir()

    def join(self, timeout: float | None = None) -> bool:
        """Waits for its end, at most `timeout` seconds; returns whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _stir(self) -> None:
        try:
            self._wake.send(b"w")
        except (BlockingIOError, OSError):
            return  # it is awake and has not looked yet; or it has ended

    # -- in the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._step():
                self._wait()
        except Exception as e:
            # A defect, or a system that has no room for anything: nobody must wait for this.
            log.exception("the thread that watches background calls has failed")
            self._on_error(AsyncCallError(f"background calls are not watched any more: {e!r}"))
        finally:
            with self._guard:
                self._runner.close()
            self._wake.close()
            self._woken.close()

    def _wait(self) -> None:
        with self._guard:
            descriptors = self._runner.descriptors()
        # The main thread may start another call now: it wakes this one.
        readable(self._woken.fileno(), *descriptors)
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            return

    def _step(self) -> bool:
        """Says what there is to say. Returns whether the thread is to end."""
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
                # What has ended well before counts; the rest, and what was killed, is dropped.
                (dropped, cause), self._drop = self._drop, None
                outcomes = [(index, outcome) for index, outcome in outcomes if not outcome.cause]
                dropped = dropped | self._names
            names = dict(self._names)
            ending = self._ending
        for index, outcome in outcomes:
            if index in names:  # else it was given up while it was being scheduled
                self._say(index, names[index], outcome)
        for index, name in dropped.items():
            # Also where this rank has just finished: others may not have, and never will be
            # waited for. If all have, this claim comes too late, and changes nothing.
            self._say(index, name, Outcome(cause))
        with self._guard:
            for index in [*dropped, *(index for index, _ in outcomes)]:
                self._names.pop(index, None)
            through = sorted(self._left - self._names.keys())
            self._left -= set(through)
        for index in through:
            self._before_forgetting(index)
            self._try(functools.partial(self._ledger.forget, index))
        return ending and not self._names

    def _say(self, index: int, name: str, outcome: Outcome) -> None:
        if outcome.cause is None:
            self._try(functools.partial(self._ledger.finish, index))
            return
        rank = self._ledger.rank
        failure = CallFailure.here(index, name, rank, outcome.cause, outcome.traceback)
        self._try(functools.partial(self._ledger.fail, index, failure))

    def _try(self, operation: Callable[[], Any]) -> None:
        try:
            operation()
        except StoreError as e:
            self._on_error(e)
