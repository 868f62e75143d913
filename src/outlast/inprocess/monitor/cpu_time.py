"""CPU time as a sign that a process works, and does not wait."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from outlast.clock import Clock
from outlast.system.processes import status_fields

_SHARE = 0.1  # of one core; processes that only wait use far less, even if they poll
_PAUSES = 4  # times the time between two samples
_SAMPLE_S = 0.5  # the kernel counts in units of 10 ms
_TICKS_S = os.sysconf("SC_CLK_TCK")


class CpuTime:
    """CPU time as a sign of progress, for a rank that runs no Python code: it may compile, or
    compute in one call into C. A rank that is blocked or stopped uses none. Measures the main
    process `main`: one of its threads, and the processes that it has started, except this one.
    """

    def __init__(self, main: int, clock: Clock) -> None:
        self._main, self._clock = main, clock
        self._what: tuple[int, bool, bool, bool] = (0, False, False, False)
        self._used, self._at = 0.0, 0.0
        self.progress = 0.0  # when CPU time was last seen to be used
        self.queued = 0.0  # seconds in which the first thread has waited for a core, so far

    def sample(
        self,
        thread: int,
        *,
        own: bool,
        children: bool,
        queued: bool = False,
        every: float | None = None,
    ) -> None:
        """Call it regularly while no Python code runs. `thread`: the function's thread, or 0 for
        all. `own` and `children`: whether its time, and that of other processes, counts; `queued`:
        also the time in which its first thread waited for a core. `every`: seconds between looks.
        """
        now, what = self._clock.now(), (thread, own, children, queued)
        if what == self._what and now - self._at < (every or _SAMPLE_S):
            return
        used = (self._of_thread(thread) if own else 0.0) + (self._of_children() if children else 0)
        if queued:
            self.queued = self._queued()
            used += self.queued
        # A pause between two samples is not one in which nothing was used.
        if every is not None and now - self._at > _PAUSES * every:
            self.progress = now  # this process was paused: maybe the whole machine was
        comparable = what == self._what and now - self._at < 10 * max(_SAMPLE_S, 1.0)
        if comparable and used - self._used >= _SHARE * (now - self._at):
            self.progress = now
        self._what, self._used, self._at = what, used, now

    def _of_thread(self, thread: int) -> float:
        place = f"/task/{thread}" if thread else ""
        try:
            return sum(map(int, status_fields(self._main, place)[11:13])) / _TICKS_S
        except OSError:
            return 0.0  # it has ended

    def _queued(self) -> float:
        try:
            return int(Path(f"/proc/{self._main}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0  # it has ended, or the kernel does not count it

    def _of_children(self) -> float:
        """Also of those that have ended, as far as their parents have waited for them."""
        used = 0.0
        try:
            process = psutil.Process(self._main)
            times = process.cpu_times()
            used += times.children_user + times.children_system
            children = process.children(recursive=True)
        except psutil.Error:
            return used  # it has ended
        for child in children:
            try:
                if child.pid != os.getpid():
                    used += sum(child.cpu_times()[:4])
            except psutil.Error:
                continue  # it has ended meanwhile
        return used
