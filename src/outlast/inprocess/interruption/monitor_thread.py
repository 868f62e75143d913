"""The monitor thread: it alone blocks on the store, on a connection of its own.

The function's thread never waits in C: a signal (Ctrl-C, ours) could not be handled there. It
hands every wait to this thread and waits for the answer in Python. While the function runs, the
wait is the *guard* of the iteration: until `over/k` appears, an event, no poll.

When the guard finds that the iteration is to end, in this order: no `atomic()` is entered any
more; the abort runs; the function's thread is interrupted, again and again until it has left.
"""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from outlast.coordination.membership import COMPLETED
from outlast.coordination.ops import Op
from outlast.coordination.stores.store import KeyTimeout
from outlast.events import (
    AbortDone,
    Emitter,
    Event,
    InterruptSent,
    InterruptSwallowed,
    Seen,
)
from outlast.inprocess.distributed.connection import Connection
from outlast.inprocess.interruption.atomic import AtomicGate
from outlast.inprocess.interruption.interrupter import Interrupter
from outlast.inprocess.interruption.stack_sample import Standstill, look
from outlast.inprocess.progress.shared_page import Activity, SharedPage

__all__ = ["Guard", "Watcher"]

log = logging.getLogger("outlast.inprocess")

T = TypeVar("T")


class Guard:
    """What the guard of one iteration knows.

    Attributes:
        seen: set when the iteration is known to end in a restart.
        left: set by the function's thread when it is out of the function.
        found: how the function's thread was met at that moment, if it was in user code.
        how: the future end of the iteration; a `StoreError` if the store is lost.
    """

    def __init__(self) -> None:
        self.seen = threading.Event()
        self.left = threading.Event()
        self.found: Standstill | None = None
        self.how: Future[bytes] = Future()

    def wait(self, timeout: float | None) -> bytes:
        """Waits for the end of the iteration.

        Raises:
            KeyTimeout: after `timeout` seconds.
        """
        try:
            return self.how.result(timeout)
        except FutureTimeout:
            raise KeyTimeout(f"the iteration was not over within {timeout} s") from None


class Watcher:
    """A thread with a connection of its own.

    Args:
        connection: only this thread uses it.
        gate, interrupter, page: of the function's thread.
        abort: ends in-flight work; called with `True` again and again while the function is not
            left, since work may have begun after the first time.
        emitter: takes the events.
        retry: pause before an interrupt is repeated, in seconds.
        renew: makes another connection, should a wait have to be broken off.
    """

    def __init__(
        self,
        connection: Connection,
        gate: AtomicGate,
        interrupter: Interrupter,
        page: SharedPage,
        abort: Callable[[bool], None],
        emitter: Emitter,
        retry: float = 0.005,
        renew: Callable[[], Connection] | None = None,
    ) -> None:
        self._connection = connection
        self._gate = gate
        self._interrupter = interrupter
        self._page = page
        self._abort = abort
        self._emitter = emitter
        self._retry = retry
        self._renew = renew
        self._pending: tuple[str, Future[bytes] | None] = ("", None)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="outlast-monitor", daemon=True)
        self._thread.start()

    @property
    def native_id(self) -> int:
        """The system's id of the thread."""
        return self._thread.native_id or 0

    def wait_for(self, op: Op) -> bytes:
        """Performs a wait for the function's thread.

        The timeout is kept here, not on the connection: one that torch's client sees run out
        costs a log line and two look-ups of names, which take seconds where no resolver answers.
        The wait itself goes on; who asks for the same key again gets its answer.

        Raises:
            KeyTimeout: when the time is over.
        """
        if self._renew is None or not self._connection.can_break_off:
            return self._submit(lambda: self._connection.wait_for(op.key, op.timeout)).result()
        key, future = self._pending
        if key != op.key or future is None:
            self._drop_pending()
            future = self._submit(lambda: self._connection.wait_for(op.key, None))
            self._pending = op.key, future
        if not concurrent.futures.wait([future], op.timeout).done:
            raise KeyTimeout(f"no {op.key!r} within {op.timeout} s")
        self._pending = "", None
        return future.result()

    def guard(self, key: str) -> Guard:
        """Starts to guard the iteration that `key` is the end of."""
        guard = Guard()
        self._drop_pending()
        self._tasks.put(lambda: self._guard(key, guard))
        return guard

    def close(self, timeout: float) -> None:
        """Ends the thread, breaking off what it may still wait for."""
        if self._pending[1] is not None:
            self._connection.break_off()
        self._tasks.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._connection.break_off()
            self._thread.join(timeout)
        self._connection.close()

    def break_off(self) -> None:
        """Ends the wait that is under way, whose asker has gone away."""
        self._connection.break_off()

    def _drop_pending(self) -> None:
        """Breaks off a wait that nobody waits for any more; the thread goes on with a new
        connection.
        """
        future, self._pending = self._pending[1], ("", None)
        renew = self._renew
        if future is None or renew is None or future.done():
            return
        self._connection.break_off()

        def replace() -> None:
            self._connection.close()
            self._connection = renew()

        self._submit(replace)

    # -- in the thread -----------------------------------------------------------------------

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def task() -> None:
            try:
                future.set_result(work())
            except Exception as e:  # noqa: BLE001 - raised in the thread that asked
                future.set_exception(e)

        self._tasks.put(task)
        return future

    def _guard(self, key: str, guard: Guard) -> None:
        outcome: Any
        try:
            outcome = self._connection.wait_for(key, None)
        except Exception as e:  # noqa: BLE001 - told in the function's thread, by `how`
            outcome = e
        failed = isinstance(outcome, Exception)
        try:
            if outcome != COMPLETED:
                self._end_iteration(guard, str(outcome) if failed else outcome.decode())
        except Exception as e:  # noqa: BLE001 - a full disk under the event log, a defect of ours
            outcome = outcome if failed else e
            guard.seen.set()
            self._interrupt(guard)
        if isinstance(outcome, Exception):
            guard.how.set_exception(outcome)
        else:
            guard.how.set_result(outcome)

    def _end_iteration(self, guard: Guard, reason: str) -> None:
        if not guard.left.is_set():
            guard.found = look(self._interrupter, self._page, self._emitter.clock.now())
        guard.seen.set()
        self._emitter.emit(Seen(reason=reason))
        # From here on the hard timeout runs, for an `atomic()` in a long phase too: the others wait
        # at a barrier, and all of them would give up before this one comes.
        self._leaving()
        self._gate.begin_termination()
        self._leaving()
        start, error = self._emitter.clock.now(), ""
        try:
            self._abort(False)
        except Exception as e:
            log.exception("abort raised an exception; the restart goes on")
            error = repr(e)
        seconds = self._emitter.clock.now() - start
        self._emitter.emit(AbortDone(seconds=seconds, error=error))
        self._interrupt(guard)

    def _leaving(self) -> None:
        self._page.progress = self._emitter.clock.now()
        self._page.activity = Activity.LEAVING

    def _interrupt(self, guard: Guard) -> None:
        pause, landed = self._retry, self._interrupter.landed
        told = ""
        while not guard.left.is_set():
            how = self._interrupter.request()
            if how not in ("none", told):
                self._tell(InterruptSent(how=how))
                told = how
            if guard.left.wait(pause):
                return
            try:
                self._abort(True)
            except Exception:
                log.exception("abort raised an exception; the restart goes on")
            if guard.left.is_set():  # meanwhile: where it is now is no code of the user's
                return
            if self._interrupter.landed > landed:
                landed = self._interrupter.landed
                where = self._interrupter.where()
                log.warning("the interrupt was swallowed, it is repeated; now at %s", where)
                self._tell(InterruptSwallowed(where=where))
            pause = min(2 * pause, 1.0)

    def _tell(self, event: Event) -> None:
        """An event that must not end the thread: the function's thread waits for it to go on."""
        try:
            self._emitter.emit(event)
        except Exception:
            log.exception("an event could not be written; the restart goes on")
