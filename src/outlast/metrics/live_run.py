"""A run while it goes on: its events so far, its present state, and its report up to now."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from outlast.events.event import Event, Note
from outlast.events.report import Report, build
from outlast.events.run_folders import Follower
from outlast.events.types import CheckpointCommitted, StepsDone
from outlast.metrics.progress_page import Progress, read_progress
from outlast.metrics.run_state import Process, RunState, State

NOW = "outlast.now"
"""Name of the note that extends the report of a running job up to the present moment."""

_PAUSE_FACTOR = 20
_RESTART_S = 120.0
_IN_FUNCTION = (State.RUNNING, State.RESERVE, State.RESTARTING, State.RETURNED)


class LiveRun:
    """Follows one run.

    Args:
        host: if given, only the logs of processes on this host are read.
        name: of the run; by default, the name of its folder.
        alive: whether the run goes on; by default, whether one of its processes on this host does.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        host: str | None = None,
        name: str = "",
        alive: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = Path(folder)
        self.name = name or self.folder.absolute().name
        self.state = RunState()  # of the processes and checkpoints, after the last `poll`
        # the name of this host, whose clock is that of this host's events
        self.own_host = socket.gethostname()
        # reads the logs; it counts the lines that are not events
        self.follower = Follower(folder, host=host)
        self._look = alive
        self._alive: bool | None = None
        self._clock = clock
        self._events: list[Event] = []
        self._steps: dict[tuple[str, int, int, int], int] = {}
        self._origins: dict[str, float] = {}
        self._began: dict[tuple[str, int], float] = {}
        self._report: Report | None = None
        self._due = 0.0
        self._version, self._built = 0, -1

    @property
    def up_to_date(self) -> bool:
        return self._built == self._version

    def poll(self) -> list[Event]:
        self._alive = None
        new = self.follower.poll()
        for event in new:
            self.state.apply(event)
            first = self._origins.setdefault(event.host, event.time)
            self._origins[event.host] = min(first, event.time)
            self._began.setdefault((event.host, event.pid), event.time)
            self._keep(event)
        self._version += bool(new)
        return new

    def alive(self) -> bool:
        """Whether a process of the run still existed on this host after the last poll; of other
        hosts it is not known, so `False` does not mean that they have ended.
        """
        if self._alive is None:
            look = self._look
            self._alive = any(map(self._exists, self._began)) if look is None else look()
        return self._alive

    def over(self) -> bool:
        """Whether every launcher has recorded its end, or this host had the whole run and none of
        its processes exists any more. Another launcher than `outlast run` writes no events: it may
        be about to start new processes, and has two minutes for that.
        """
        hosts = {host for host, _ in self.state.processes} or set(self.state.now)
        hosts -= set(self.state.hosts_lost.values())
        if hosts and hosts <= self.state.exit_codes.keys():
            return True
        if not hosts or not hosts <= {self.own_host} or self.alive():
            return False
        silent_s = self._clock() - self.state.now[self.own_host]
        return bool(self.state.launchers) or not 0 <= silent_s < _RESTART_S

    def now(self, host: str) -> float | None:
        """The present time of a host's clock; of another host, the time of its last event."""
        last = self.state.now.get(host)
        if host == self.own_host and last is not None and self.alive():
            return max(self._clock(), last)
        return last

    def is_here(self, process: Process) -> bool:
        """Whether it runs on this host, as far as its events say."""
        return not process.over and process.host == self.own_host and self.alive()

    def progress(self, process: Process) -> Progress | None:
        """The progress of a process of this host, which is newer than its events."""
        return read_progress(process.pid) if self.is_here(process) else None

    def newest_save(self) -> tuple[CheckpointCommitted, float] | None:
        """The newest committed save, by the clock of this host if it has one; and the time since it
        began, in seconds.
        """
        saves = self.state.newest_saves
        found: tuple[CheckpointCommitted, float] | None = None
        for host in [self.own_host] if self.own_host in saves else saves:
            event, now = saves[host], self.now(host)
            age_s = 0.0 if now is None else max(0.0, now - event.time + event.seconds)
            if found is None or age_s < found[1]:
                found = event, age_s
        return found

    def origin(self, host: str) -> float:
        """The time of a host's first event, from which the report counts."""
        return self._origins.get(host, 0.0)

    def report(self) -> Report:
        """The report up to now.

        It is computed from all events, which takes longer the more there are. The last one is
        returned again until twenty times as long has passed: this process then uses a twentieth
        of one core at most. Once the run is over, the report is that of all events.
        """
        began = time.monotonic()
        due = began >= self._due and (not self.up_to_date or self.alive())
        if self._report is None or due or (not self.up_to_date and self.over()):
            self._report = build([*self._events, *self._present()])
            self._built = self._version
            took = time.monotonic() - began
            self._due = began + took * (1 + _PAUSE_FACTOR)
        return self._report

    def _present(self) -> list[Event]:
        """A note that one member of this host is still there now, while the run goes on. Otherwise
        the time since the last event would be missing from the goodput.
        """
        now = self.now(self.own_host)
        if now is None or not self.alive():
            return []
        here = [p for p in self.state.processes.values() if p.host == self.own_host and not p.over]
        # Not a process that has only asked to join, or that the launcher has only started.
        members = [p.member for p in here if p.member >= 0 and p.state in _IN_FUNCTION]
        if here and not any(p.member >= 0 for p in self.state.processes.values()):
            members = [-1]  # without `Wrapper` there are no members
        return [Note(name=NOW, host=self.own_host, time=now, member=m) for m in members[:1]]

    def _keep(self, event: Event) -> None:
        """Adds the event to those of the report. Of the records of completed steps with the same
        beginning, only the last one matters: a process writes one every ten seconds.
        """
        if isinstance(event, StepsDone):
            key = event.host, event.pid, event.iteration, event.first
            if key in self._steps:
                self._events[self._steps[key]] = event
                return
            self._steps[key] = len(self._events)
        self._events.append(event)

    def _exists(self, process: tuple[str, int]) -> bool:
        """Whether the process that wrote events under this ID still exists."""
        host, pid = process
        if host != self.own_host or pid <= 0:
            return False
        try:
            began = psutil.Process(pid).create_time() - psutil.boot_time()
        except psutil.Error:
            return False
        # A later process with the same ID began after the first event. The event's clock stands
        # still while the machine is suspended, the process's does not.
        suspended = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
        return began <= self._began[process] + max(0.0, suspended) + 1.0
