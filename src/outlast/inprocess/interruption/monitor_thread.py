"""The monitor thread: waits for the end of the iteration, and interrupts the function then.

While the function runs, this thread waits for the iteration's key `over/k`: an event, not a poll.
When that key says that the iteration ends in a restart, then, in this order: `atomic()` can no
longer be entered; the abort runs; the function's thread is interrupted, repeatedly, until it has
left the function.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import torch.distributed as dist

from outlast.coordination.membership import COMPLETED
from outlast.coordination.stores.store import KeyTimeout
from outlast.coordination.training_step import loop
from outlast.events.emitter import Emitter
from outlast.events.types import AbortDone, InterruptSent, InterruptSwallowed, Seen
from outlast.inprocess.interruption.communicators import set_has_store
from outlast.inprocess.interruption.error_kinds import is_consequence
from outlast.inprocess.interruption.flight_recorder import process_groups
from outlast.inprocess.interruption.interrupter import AtomicSection, Interrupter, places_of
from outlast.inprocess.monitor.shared_page import Activity, Blocked, SharedPage
from outlast.inprocess.store import Connection
from outlast.system.frames import user_place
from outlast.system.parallel import start_thread

log = logging.getLogger("outlast.inprocess")

_RETRY_S = 0.005
"""The first pause before an interrupt is repeated."""


@dataclasses.dataclass(frozen=True)
class StackSample:
    """The function's thread at the end of the iteration. If a soft timeout ended it, the samples of
    all ranks distinguish the rank that hangs from the ranks that wait for it.

    `pings` and `collectives` tell how far the function had come; `collectives` counts those of the
    default group, and is -1 if the backend does not count them.
    """

    where: str  # the innermost frames
    line: str  # the user's innermost line
    waits_for_others: bool  # in torch code where a rank waits, or in this package
    idle: float  # seconds since the last progress,
    unpinged: float  # and since the last ping, step, or entry into the function;
    pause: float  # the longest time without progress since then that had ended
    declared: bool  # it was in a declared long phase, and did not only wait for other ranks
    pings: int
    collectives: int
    groups: Mapping[str, str]  # the process groups: see `flight_recorder`, as for the times,
    since_ns: int  # of the iteration,
    until_ns: int  # and of this sample
    loop: tuple[int, int, str]  # where the training loop is: `Loop.place`


def sample_stack(
    interrupter: Interrupter, page: SharedPage, now: float, since_ns: int, least_hang: float
) -> StackSample | None:
    """Samples from another thread; `None` while the function's thread runs no user code, or if it
    has made progress in the last `least_hang` seconds: then it has no hang to report.
    """
    if page.activity not in (Activity.USER, Activity.FUNCTION):
        return None
    if not _may_hang(page, now, least_hang):
        return None
    if page.activity == Activity.FUNCTION and not interrupter.in_function():
        return None  # it has just left it, for an error, whose place is known: `sample_of_error`
    places = interrupter.where(), interrupter.user_place()
    return _sample(places, interrupter.waits_for_others(), page, now, since_ns)


def _may_hang(page: SharedPage, now: float, least_hang: float) -> bool:
    """Whether `RankFaults.hang_report` may need a sample."""
    waited = loop.wait.seconds >= least_hang and loop.wait.is_recent(time.time_ns())
    return waited or now - page.pinged >= least_hang or page.reported_soft == page.iteration


def sample_of_error(
    error: BaseException, page: SharedPage, now: float, watch: IterationWatch, least_hang: float
) -> StackSample | None:
    """The sample of `watch`, or the same where the abort of another rank has ended a wait before
    this rank was sampled, or while a `finally` ran then. To raise the error, and to clean up after
    it, was no progress: the pause before it, of `least_hang` seconds or more, counts.
    """
    sample = watch.sample
    is_earlier = sample is None or sample.idle < least_hang <= sample.pause
    is_needed = sample is not None or _may_hang(page, now, least_hang)
    if not (is_earlier and is_needed and is_consequence(error)):
        return watch.sample  # of the monitor thread, which may have sampled meanwhile
    where = places_of(reversed(list(traceback.walk_tb(error.__traceback__))))
    place = where, user_place(error)
    if sample is None:
        sample = _sample(place, True, page, now, watch.since_ns)
        return watch.sample or dataclasses.replace(sample, idle=sample.unpinged)
    return dataclasses.replace(
        sample, where=where, line=place[1], waits_for_others=True, idle=sample.pause
    )


def _sample(
    places: tuple[str, str], waits: bool, page: SharedPage, now: float, since_ns: int
) -> StackSample:
    where, line = places
    return StackSample(
        where=where,
        line=line,
        waits_for_others=waits,
        idle=now - page.progress,
        unpinged=now - page.pinged,
        pause=page.pause_since_ping(),
        declared=page.long_limit != 0 and not (page.waits or page.blocked == Blocked.COLLECTIVE),
        pings=page.pings,
        collectives=_collectives(),
        groups=process_groups(),
        since_ns=since_ns,
        until_ns=time.time_ns(),
        loop=loop.place,
    )


def _collectives() -> int:
    """How many collectives of the default group this rank has started: fewer means behind."""
    if not dist.is_available():
        return -1
    group: Any = dist.distributed_c10d._world.default_pg
    if group is None:
        return 0  # the function has not created the group yet
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return -1  # not every backend counts


class IterationWatch:
    """The monitor thread's watch over one iteration."""

    def __init__(self) -> None:
        self.ending = threading.Event()  # this rank knows that the iteration ends in a restart
        self.left = threading.Event()  # the function's thread has left the function
        self.sample: StackSample | None = None  # of the end, if that thread was in user code
        self.since_ns = time.time_ns()
        self.outcome: Future[bytes] = Future()  # a `StoreError` if the store is lost

    def wait(self, timeout: float | None) -> bytes:
        """Waits for the end of the iteration; a `KeyTimeout` after `timeout` seconds."""
        try:
            return self.outcome.result(timeout)
        except FutureTimeout:
            raise KeyTimeout(f"the iteration was not over within {timeout} s") from None


class MonitorThread:
    """Ends in-flight work by `abort(False)`, and work that has started since by `abort(True)`."""

    def __init__(
        self,
        connection: Connection,
        atomic_section: AtomicSection,
        interrupter: Interrupter,
        page: SharedPage,
        abort: Callable[[bool], None],
        emitter: Emitter,
        least_hang: float = 0.0,
    ) -> None:
        self._connection, self._least_hang = connection, least_hang
        self._atomic_section, self._interrupter, self._page = atomic_section, interrupter, page
        self._abort, self._emitter = abort, emitter
        self._watches: queue.SimpleQueue[tuple[str, IterationWatch] | None] = queue.SimpleQueue()
        self._thread = start_thread("outlast-monitor", self._work)

    @property
    def native_id(self) -> int:
        return self._thread.native_id or 0

    def watch_iteration(self, key: str, *, left: bool = False) -> IterationWatch:
        """Watches for the end of the iteration, under `key`; if `left`, no function is entered."""
        watch = IterationWatch()
        if left:
            watch.left.set()
        self._watches.put((key, watch))
        return watch

    def close(self, timeout: float) -> None:
        """Ends the thread; breaks off its wait after `timeout` seconds."""
        self._watches.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._connection.break_off()
            self._thread.join(timeout)

    # -- in the monitor thread -----------------------------------------------------------------

    def _work(self) -> None:
        while (task := self._watches.get()) is not None:
            self._watch(*task)

    def _watch(self, key: str, watch: IterationWatch) -> None:
        outcome: Any
        try:
            outcome = self._connection.wait_for(key, None)
        except Exception as e:  # noqa: BLE001 - raised in the function's thread, by `outcome`
            outcome = e
        failed = isinstance(outcome, Exception)
        set_has_store(not failed)
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
            of = self._interrupter, self._page
            sample = sample_stack(*of, now, watch.since_ns, self._least_hang)
            watch.sample = watch.sample or sample  # the function may be left by now
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
        pause, landed = _RETRY_S, self._interrupter.landed
        reported = ""
        while not watch.left.is_set():
            how = self._interrupter.request()
            if how not in ("none", reported):
                log.debug("rank %d: interrupting the function (%s)", self._page.rank, how)
                self._emitter.emit(InterruptSent(how=how))
                reported = how
            if self._left_within(pause, watch):
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
                        "something caught the interrupt, such as a bare except or C code; it is "
                        "repeated, now at %s",
                        where,
                    )
                    self._emitter.emit(InterruptSwallowed(where=where))
            pause = min(2 * pause, 1.0)

    def _left_within(self, pause: float, watch: IterationWatch) -> bool:
        """Waits until the function was left, and repeats a request that was deferred."""
        end = time.monotonic() + pause
        while (remaining := end - time.monotonic()) > _RETRY_S and self._interrupter.deferred:
            if watch.left.wait(_RETRY_S):
                return True
            self._interrupter.request()
        return watch.left.wait(max(0.0, remaining))
