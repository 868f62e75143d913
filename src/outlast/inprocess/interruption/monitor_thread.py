"""The monitor thread: waits on the store, and interrupts the function when the iteration ends.

The function's thread never waits in C, because no signal (Ctrl-C, or the interrupt) could be
handled there. It hands every wait on the store to this thread, which has a separate connection,
and waits for the answer in Python. While the function runs, this thread waits for the iteration's
key `over/k`: an event, not a poll.

When that key says that the iteration ends in a restart, then, in this order: `atomic()` can no
longer be entered; the abort runs; the function's thread is interrupted, repeatedly, until it has
left the function.
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
from outlast.events import AbortDone, Emitter, Event, InterruptSent, InterruptSwallowed, Seen
from outlast.inprocess.distributed.connection import Connection
from outlast.inprocess.distributed.torch_log import QuietTorchLog
from outlast.inprocess.interruption.atomic import AtomicSection
from outlast.inprocess.interruption.interrupter import Interrupter
from outlast.inprocess.interruption.stack_sample import StackSample, sample_stack
from outlast.inprocess.progress.shared_page import Activity, SharedPage

log = logging.getLogger("outlast.inprocess")

T = TypeVar("T")


class IterationWatch:
    """The monitor thread's watch over one iteration.

    Attributes:
        ending: set once this rank knows that the iteration ends in a restart.
        left: set by the function's thread when it has left the function.
        sample: the function's thread at the end of the iteration, if it was in user code.
        outcome: a future with the iteration's outcome; a `StoreError` if the store is lost.
    """

    def __init__(self) -> None:
        self.ending = threading.Event()
        self.left = threading.Event()
        self.sample: StackSample | None = None
        self.outcome: Future[bytes] = Future()

    def wait(self, timeout: float | None) -> bytes:
        """Waits for the end of the iteration.

        Raises:
            KeyTimeout: after `timeout` seconds.
        """
        try:
            return self.outcome.result(timeout)
        except FutureTimeout:
            raise KeyTimeout(f"the iteration was not over within {timeout} s") from None


class MonitorThread:
    """A thread with a separate connection to the store.

    Args:
        connection: used by this thread alone.
        atomic_section, interrupter, page: of the function's thread.
        abort: ends in-flight work. The argument is `False` the first time, and `True` for each
            repetition until the function has been left, since new work may have started.
        retry: pause before an interrupt is repeated, in seconds.
        reconnect: makes another connection after a wait had to be broken off.
    """

    def __init__(
        self,
        connection: Connection,
        atomic_section: AtomicSection,
        interrupter: Interrupter,
        page: SharedPage,
        abort: Callable[[bool], None],
        emitter: Emitter,
        retry: float = 0.005,
        reconnect: Callable[[], Connection] | None = None,
    ) -> None:
        self._connection, self._reconnect = connection, reconnect
        self._atomic_section, self._interrupter, self._page = atomic_section, interrupter, page
        self._abort, self._emitter, self._retry = abort, emitter, retry
        self._pending: tuple[str, Future[bytes] | None] = ("", None)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="outlast-monitor", daemon=True)
        self._thread.start()

    @property
    def native_id(self) -> int:
        return self._thread.native_id or 0

    def wait_for(self, op: Op) -> bytes:
        """Performs a wait for the function's thread.

        The timeout is kept here, not on the connection: a timeout in torch's client costs a log
        line and two name lookups, which take seconds where no resolver answers. The wait itself
        continues; a later call for the same key gets its answer.

        Raises:
            KeyTimeout: after `op.timeout` seconds.
        """
        if self._reconnect is None or not self._connection.can_break_off:
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

    def watch_iteration(self, key: str, *, left: bool = False) -> IterationWatch:
        """Starts watching the iteration whose end is announced under `key`; with `left`, this rank
        does not enter its function.
        """
        watch = IterationWatch()
        if left:
            watch.left.set()
        self._drop_pending()
        self._tasks.put(lambda: self._watch(key, watch))
        return watch

    def close(self, timeout: float) -> None:
        """Ends the thread, breaking off any wait in progress."""
        with QuietTorchLog():
            if self._pending[1] is not None:
                self._connection.break_off()
            self._tasks.put(None)
            self._thread.join(timeout)
            if self._thread.is_alive():
                self._connection.break_off()
                self._thread.join(timeout)
        self._connection.close()

    def break_off(self) -> None:
        """Ends the current wait, whose answer is no longer needed."""
        self._connection.break_off()

    def _drop_pending(self) -> None:
        """Breaks off a wait whose answer is no longer needed, and opens a new connection."""
        future, self._pending = self._pending[1], ("", None)
        reconnect = self._reconnect
        if future is None or reconnect is None or future.done():
            return
        quiet = QuietTorchLog()
        quiet.begin()
        self._connection.break_off()

        def replace() -> None:
            quiet.end()  # in this thread, so the wait has ended
            self._connection.close()
            self._connection = reconnect()

        self._submit(replace)

    # -- in the monitor thread -----------------------------------------------------------------

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def task() -> None:
            try:
                future.set_result(work())
            except Exception as e:  # noqa: BLE001 - raised in the thread that submitted the work
                future.set_exception(e)

        self._tasks.put(task)
        return future

    def _watch(self, key: str, watch: IterationWatch) -> None:
        outcome: Any
        try:
            outcome = self._connection.wait_for(key, None)
        except Exception as e:  # noqa: BLE001 - raised in the function's thread, by `outcome`
            outcome = e
        failed = isinstance(outcome, Exception)
        try:
            if outcome != COMPLETED:
                self._end_iteration(watch, str(outcome) if failed else outcome.decode())
        except Exception as e:  # noqa: BLE001 - the event log on a full disk, or a bug here
            outcome = outcome if failed else e
            watch.ending.set()
            self._interrupt(watch)
        if isinstance(outcome, Exception):
            watch.outcome.set_exception(outcome)
        else:
            watch.outcome.set_result(outcome)

    def _end_iteration(self, watch: IterationWatch, reason: str) -> None:
        if not watch.left.is_set():
            now = self._emitter.clock.now()
            watch.sample = sample_stack(self._interrupter, self._page, now)
        watch.ending.set()
        self._emitter.emit(Seen(reason=reason))
        # The hard timeout runs from here on, even in an `atomic()` in a long phase: the other ranks
        # wait at a barrier, and all of them would time out before this rank arrives.
        self._mark_leaving()
        self._atomic_section.begin_termination()
        self._mark_leaving()
        log.debug("rank %d: the iteration is over (%s): abort", self._page.rank, reason)
        start, error = self._emitter.clock.now(), ""
        try:
            self._abort(False)
        except Exception as e:
            log.exception("abort raised an exception; the restart continues")
            error = repr(e)
        seconds = self._emitter.clock.now() - start
        log.debug("rank %d: abort done after %.6f s", self._page.rank, seconds)
        self._emitter.emit(AbortDone(seconds=seconds, error=error))
        self._interrupt(watch)

    def _mark_leaving(self) -> None:
        self._page.enter(Activity.LEAVING, self._emitter.clock.now())

    def _interrupt(self, watch: IterationWatch) -> None:
        pause, landed = self._retry, self._interrupter.landed
        reported = ""
        while not watch.left.is_set():
            how = self._interrupter.request()
            if how not in ("none", reported):
                log.debug("rank %d: interrupting the function (%s)", self._page.rank, how)
                self._emit(InterruptSent(how=how))
                reported = how
            if watch.left.wait(pause):
                return
            try:
                self._abort(True)
            except Exception:
                log.exception("abort raised an exception; the restart continues")
            if watch.left.is_set():  # left in the meantime: the thread is not in user code
                return
            if self._interrupter.landed > landed:
                landed = self._interrupter.landed
                if not self._interrupter.cleans_up():
                    where = self._interrupter.where()
                    log.warning(
                        "user code swallowed the interrupt, it is repeated; now at %s", where
                    )
                    self._emit(InterruptSwallowed(where=where))
            pause = min(2 * pause, 1.0)

    def _emit(self, event: Event) -> None:
        """Emits an event whose failure must not end the thread: the function's thread needs it."""
        try:
            self._emitter.emit(event)
        except Exception:
            log.exception("an event could not be written; the restart continues")
