"""One line for a main process that cannot run Python code: it is stopped, or holds the GIL.

The main process cannot say it, so its monitor process does, on the main process's stderr. It opens
that stream only for the line: a descriptor that stayed open would keep a pipe from ending.
"""

from __future__ import annotations

import os
from pathlib import Path

from outlast.clock import Clock
from outlast.inprocess.monitor.config import MonitorPlan
from outlast.inprocess.monitor.logfile import write_line
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
        page, heartbeat = self._page, self._page.heartbeat
        idle = self._clock.now() - heartbeat
        timed = page.activity == Activity.FUNCTION and page.long_limit == 0
        if not timed or not heartbeat or heartbeat == self._said or idle < AFTER_S:
            return
        self._said = heartbeat
        _, hard = timeouts_in_force(self._plan, page)
        why = "is stopped (SIGSTOP)" if _is_stopped(self._main) else "is in code that holds the GIL"
        _say(
            self._main,
            f"rank {self._page.rank} on {self._host}: no progress for {idle:.0f} s: process "
            f"{self._main} {why}; after {hard:.0f} s it is ended",
        )


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False  # it has ended


def _say(pid: int, line: str) -> None:
    """Writes a line to the stderr of another process, unless that is closed, a socket, or a file
    at a position of the other process's own, where it would overwrite the line.
    """
    try:
        flags = Path(f"/proc/{pid}/fdinfo/2").read_text().partition("flags:")[2].split()[0]
        descriptor = os.open(
            f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
        )
    except OSError as e:
        write_line(f"{line} (not shown: {e})")
        return
    with os.fdopen(descriptor, "wb", buffering=0) as stream:
        if not stream.seekable() or int(flags, 8) & os.O_APPEND:
            try:
                stream.write(f"{line}\n".encode())
            except OSError as e:
                write_line(f"{line} (not shown: {e})")
