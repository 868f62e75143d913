"""Stamps events with rank, host and time, measures durations with spans (the only timers), and
writes them: to a JSONL file, to a list in memory, or nowhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from outlast.clock import Clock, MonotonicClock
from outlast.events.event import Event, Note, event_to_dict
from outlast.events.spool import DROPPED, Spool

log = logging.getLogger("outlast.events")

E = TypeVar("E", bound=Event)

_encode = json.JSONEncoder(separators=(",", ":"), default=vars).encode


class Sink(Protocol):
    """Takes events. Must be callable from any thread."""

    def write(self, event: Event) -> None:
        """Takes one event."""

    def close(self) -> None:
        """Releases the sink's resources. No event is written afterwards."""


class NullSink:
    """Drops every event."""

    def write(self, event: Event) -> None:
        pass

    def close(self) -> None:
        pass


class MemorySink:
    """Keeps events in `events`, in the order of their arrival."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._lock = threading.Lock()

    def write(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)

    def close(self) -> None:
        pass


class JsonlSink:
    """Appends events to a file, one JSON object per line. Each line is one `write` to a file opened
    for appending, so that lines of threads never mix and a killed process leaves at most one torn
    line, its last.

    Args:
        path: the file; its directory is created if missing. Nothing is written outside it, unless
            it is a `Spool`: then the log goes where its events are kept, and is bounded.
        locked: whether to lock the file, as a sign that this process is alive.
    """

    def __init__(self, path: str | os.PathLike[str], *, locked: bool = False) -> None:
        self.path, self._locked, self._fd, self._gone = Path(path), locked, -1, 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._spool = Spool.of(self.path.parent)
        self._lock = threading.Lock()
        self._open(self.path)

    def _open(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        before, self._fd, self.path = self._fd, os.open(path, flags, 0o644), path
        if before >= 0:
            os.close(before)
        if self._locked:
            with contextlib.suppress(OSError):  # not on every file system
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _place(self, spool: Spool, event: Event) -> bytes:
        """Before `event`: goes on in the folder where the events are kept, or in a new file;
        returns what the new one begins with.
        """
        if self.path.parent == spool.folder and (target := spool.target) is not None:
            self._open(spool.copy(self.path, target))
        if os.fstat(self._fd).st_size < spool.limit_bytes:
            return b""
        before = self.path.with_suffix(".1.jsonl")
        self._gone += before.stat().st_size if before.exists() else 0
        os.replace(self.path, before)
        self._open(self.path)
        data = {"file": self.path.name, "bytes": self._gone}
        note = Note(name=DROPPED, data=data, host=event.host, pid=event.pid, time=event.time)
        return (_encode(event_to_dict(note)) + "\n").encode() if self._gone else b""

    def write(self, event: Event) -> None:
        content = (_encode(event_to_dict(event)) + "\n").encode()
        with self._lock:
            if self._fd >= 0:
                if self._spool is not None:
                    content = self._place(self._spool, event) + content
                written = os.write(self._fd, content)
                if written < len(content):
                    # A full disk. The next line must not continue this one: it would be damaged.
                    os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@dataclasses.dataclass
class Span:
    """A measured duration; `seconds` is set when it ends."""

    seconds: float = 0.0


@dataclasses.dataclass
class Place:
    """Where this process is in its job: the one copy, which its owner changes, and all others read.
    -1 stands for none.
    """

    iteration: int = -1
    member: int = -1  # the ID of the process in the job, for life
    rank: int = -1
    world_size: int = 0
    active: bool = True  # whether the rank calls the function


class Emitter:
    """Writes events to a sink, with iteration, member, rank, host, process id and time filled in.

    Args:
        sink: where events go; by default they are dropped.
        place: iteration, member and rank of the events; by default one of its own, with none.
        clock: for timestamps and durations.
        host: name of this host; by default the system's.
    """

    def __init__(
        self,
        sink: Sink | None = None,
        *,
        place: Place | None = None,
        clock: Clock | None = None,
        host: str | None = None,
    ) -> None:
        self.sink: Sink = NullSink() if sink is None else sink
        self.clock: Clock = MonotonicClock() if clock is None else clock
        self.host = socket.gethostname() if host is None else host
        self.place = Place() if place is None else place
        self._failed = False

    @property
    def drops(self) -> bool:
        """Whether there is no log: then events need not be made either."""
        return type(self.sink) is NullSink

    def emit(self, event: Event) -> None:
        """Stamps `event` and writes it. Fields that the event sets itself are kept, so that a
        monitor can report on another process.

        A sink that fails (on a full disk, for example) must not stop the job: it is logged once.
        """
        if self.drops:
            return
        try:
            stamped = dataclasses.replace(
                event,
                iteration=self.place.iteration if event.iteration < 0 else event.iteration,
                member=self.place.member if event.member < 0 else event.member,
                rank=self.place.rank if event.rank < 0 else event.rank,
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
        if not self.drops:
            self.emit(event(seconds=span.seconds, **fields))  # type: ignore[call-arg,arg-type]
