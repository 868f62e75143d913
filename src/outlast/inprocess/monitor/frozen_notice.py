"""One line for a main process that cannot run Python code: it is stopped, or holds the GIL.

The main process cannot say it, so its monitor process does, on the main process's stderr.
"""

from __future__ import annotations

from pathlib import Path

from outlast.clock import Clock
from outlast.inprocess.monitor.config import MonitorPlan
from outlast.inprocess.monitor.logfile import write_for
from outlast.inprocess.monitor.progress_timeouts import timeouts_in_force
from outlast.inprocess.progress.progress_notice import AFTER_S
from outlast.inprocess.progress.shared_page import Activity


class FrozenNotice:
    """Looks at the timestamps of the main process's heartbeat thread; `main` is its pid."""

    def __init__(self, plan: MonitorPlan, main: int, clock: Clock, host: str) -> None:
        self._plan, self._page, self._main = plan, plan.page, main
        self._clock, self._host = clock, host
        self._said = 0.0  # the timestamp after which it was said

    def check(self) -> None:
        """Call it regularly. Says it once, until the process runs again."""
        page = self._page
        # Before the heartbeat thread's first interval is over, there is no timestamp of it.
        heartbeat = page.heartbeat or page.progress
        idle = self._clock.now() - heartbeat
        timed = page.activity == Activity.FUNCTION and page.long_limit == 0
        if not timed or heartbeat == self._said or idle < AFTER_S:
            return
        self._said = heartbeat
        hard = timeouts_in_force(self._plan, page, Activity.FUNCTION).hard
        stopped = _is_stopped(self._main)
        why = "is stopped (SIGSTOP);" if stopped else "holds the GIL in C code; unless it computes,"
        write_for(
            self._main,
            f"rank {self._page.rank} on {self._host}: no progress for {idle:.0f} s: process "
            f"{self._main} {why} after {hard:.0f} s it is ended",
        )


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False  # it has ended
