"""The wrapped function's handle to its wrapper; and observers of calls, such as fault injection."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from outlast.clock import Clock
from outlast.inprocess.interruption.interrupter import AtomicSection
from outlast.inprocess.monitor.shared_page import SharedPage
from outlast.inprocess.state import State
from outlast.inprocess.timeouts import GapEstimator
from outlast.system.arguments import Duration, as_timedelta, seconds


class CallWrapper:
    """Passed to the function for an argument annotated `CallWrapper`.

    Attributes:
        iteration: number of the current iteration, from 0.
        state: the rank and sizes of this iteration.
        monitor_pid: process ID of this rank's monitor process.
    """

    def __init__(
        self,
        state: State,
        page: SharedPage,
        atomic_section: AtomicSection,
        clock: Clock,
        estimator: GapEstimator | None,
        monitor_pid: int | None,
        wake_monitor: Callable[[], None],
    ) -> None:
        self.state, self.monitor_pid, self._wake_monitor = state, monitor_pid, wake_monitor
        self._page, self._atomic_section = page, atomic_section
        self._clock, self._estimator = clock, estimator
        self._last_ping: float | None = None

    @property
    def iteration(self) -> int:
        """Number of the current iteration, from 0."""
        return self.state.iteration

    def ping(self) -> None:
        """Reports that the function is making progress.

        The first ping of an iteration arms `ping_timeout`, or the limit of `Adaptive`: from then
        on, a rank that neither pings nor reports a step for that long is interrupted, whatever it
        does. A ping takes about a microsecond; call it once per step.
        """
        now = self._clock.now()
        page = self._page
        if self._estimator is not None:
            if self._last_ping is not None and not page.long_limit:
                self._estimator.observe(now - self._last_ping)
            page.soft_limit = self._estimator.limit
        self._last_ping = now
        page.progress = page.pinged = now
        page.pings += 1
        for observer in observers():
            observer.pinged(self, page.pings)

    def atomic(self) -> AbstractContextManager[None]:
        """A context in which the function is not interrupted. Reentrant, for this thread only.

        A restart waits until the thread has left the context; once a restart has begun, entering
        raises `RankShouldRestart`. The hard timeout still applies.
        """
        return self._atomic_section

    def await_restart(self) -> None:
        """Waits until this rank knows of a restart that has begun; raises `RankShouldRestart`."""
        self._atomic_section.await_termination()

    @contextmanager
    def long_phase(self, limit: Duration | None = None) -> Iterator[None]:
        """Declares a phase without pings: an evaluation, a save, a first step.

        Args:
            limit: how long the phase may take before the rank counts as hung, whatever it does.
                `None`: the limits are those without `Adaptive`, whose soft timeout is then
                `Adaptive.initial`. The hard timeout follows after the same interval as in the
                settings, or a longer one.

        Phases nest: the limit of the innermost one applies.

        Raises:
            ValueError: if `limit` is not positive.
        """
        limit_s = -1.0 if limit is None else seconds(as_timedelta("limit", limit))
        page = self._page
        before, outer = page.soft_limit, page.long_limit
        page.long_limit = limit_s
        self._note_phase()
        try:
            yield
        finally:
            self._note_phase()  # before the shorter limits hold
            page.long_limit = outer
            page.soft_limit = before
            self._last_ping = None
            if self._estimator is not None and not outer:
                # Last, when the shorter limit is there: it sleeps by the one of the phase.
                self._wake_monitor()

    def _note_phase(self) -> None:
        """A phase begins or ends. One that cleans up after an exception tells nothing of how far
        the function has come: its rank may have hung (`sample_of_error`).
        """
        now = self._clock.now()
        self._page.note_progress(now)
        if sys.exc_info()[1] is None:
            self._page.pinged = now


class Observer(Protocol):
    """Called as part of the function: it may be interrupted; its exceptions are the function's."""

    def entered(self, call: CallWrapper) -> None:
        """Called just before the function, in every iteration."""

    def pinged(self, call: CallWrapper, pings: int) -> None:
        """Called at each `call.ping()`; `pings` counts from 1 in every iteration."""

    def recovering(self, iteration: int, rank: int) -> None:
        """Called in a restart in place, as part of finalize and of initialize, which have these
        iterations: the one that has ended, and the one that begins.
        """


_observers: list[Observer] = []


def add_observer(observer: Observer) -> None:
    """Adds an observer to every wrapped call of this process."""
    _observers.append(observer)


def remove_observer(observer: Observer) -> None:
    """Removes an observer; a `ValueError` if it was not added."""
    _observers.remove(observer)


def observers() -> tuple[Observer, ...]:
    """All observers, in the order in which they were added."""
    return tuple(_observers)
