"""Stamps events with rank, host and time, and measures durations with spans, the only timers.

An `Emitter` belongs to one process. `place()` sets the iteration, member and rank that later
events carry.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from outlast.clock import Clock, MonotonicClock
from outlast.events.sinks import NullSink, Sink
from outlast.events.types.base import Event

log = logging.getLogger("outlast.events")

E = TypeVar("E", bound=Event)


@dataclasses.dataclass
class Span:
    """A measured duration; `seconds` is set when it ends."""

    seconds: float = 0.0


class Emitter:
    """Writes events to a sink, with iteration, member, rank, host, process id and time filled in.

    Args:
        sink: where events go; by default they are dropped.
        clock: for timestamps and durations.
        host: name of this host; by default the system's.
    """

    def __init__(
        self, sink: Sink | None = None, *, clock: Clock | None = None, host: str | None = None
    ) -> None:
        self.sink: Sink = NullSink() if sink is None else sink
        self.clock: Clock = MonotonicClock() if clock is None else clock
        self.host = socket.gethostname() if host is None else host
        self.iteration = -1
        self.member = -1
        self.rank = -1
        self._failed = False

    def place(
        self, *, iteration: int | None = None, member: int | None = None, rank: int | None = None
    ) -> None:
        """Sets the values that later events carry; `None` leaves a value unchanged."""
        self.iteration = self.iteration if iteration is None else iteration
        self.member = self.member if member is None else member
        self.rank = self.rank if rank is None else rank

    def emit(self, event: Event) -> None:
        """Stamps `event` and writes it. Fields that the event sets itself are kept, so that a
        monitor can report on another process.

        A sink that fails (on a full disk, for example) must not stop the job: it is logged once.
        """
        try:
            stamped = dataclasses.replace(
                event,
                iteration=self.iteration if event.iteration < 0 else event.iteration,
                member=self.member if event.member < 0 else event.member,
                rank=self.rank if event.rank < 0 else event.rank,
                host=event.host or self.host,
                pid=os.getpid() if event.pid < 0 else event.pid,
                time=event.time or self.clock.now(),
            )
            self.sink.write(stamped)
        except Exception:
            if not self._failed:
                log.exception("an event could not be written; further failures are not logged")
            self._failed = True

    @contextmanager
    def span(self, event: type[E], **fields: object) -> Iterator[Span]:
        """Measures the body and emits `event(seconds=..., **fields)` when it ends normally."""
        span = Span()
        start = self.clock.now()
        yield span
        span.seconds = self.clock.now() - start
        self.emit(event(seconds=span.seconds, **fields))  # type: ignore[call-arg,arg-type]
