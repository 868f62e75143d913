"""CPU time as a sign of progress, for a rank that runs no Python code: it may compile, or compute
in one call into C. A rank that is blocked or stopped uses none.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from outlast.clock import Clock

_SHARE = 0.1  # of one core; processes that only wait use far less, even if they poll
_SAMPLE_S = 0.5  # the kernel counts in units of 10 ms
_TICKS_S = os.sysconf("SC_CLK_TCK")


class CpuTime:
    """Measures the main process `main`: one of its threads, and the processes that it has started,
    except this one.
    """

    def __init__(self, main: int, clock: Clock) -> None:
        self._main, self._clock = main, clock
        self._what: tuple[int, bool, bool] = (0, False, False)
        self._used, self._at = 0.0, 0.0
        self.progress = 0.0  # when CPU time was last seen to be used

    def sample(self, thread: int, *, own: bool, children: bool) -> None:
        """Call it regularly while no Python code runs.

        Args:
            thread: the ID of the function's thread.
            own, children: whether the time of the thread, and that of other processes, counts.
        """
        now, what = self._clock.now(), (thread, own, children)
        if what == self._what and now - self._at < _SAMPLE_S:
            return
        used = (self._of_thread(thread) if own else 0.0) + (self._of_children() if children else 0)
        # A pause between two samples is not one in which nothing was used.
        comparable = what == self._what and now - self._at < 10 * max(_SAMPLE_S, 1.0)
        if comparable and used - self._used >= _SHARE * (now - self._at):
            self.progress = now
        self._what, self._used, self._at = what, used, now

    def _of_thread(self, thread: int) -> float:
        try:
            stat = Path(f"/proc/{self._main}/task/{thread}/stat").read_text()
        except OSError:
            return 0.0  # it has ended
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / _TICKS_S

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
