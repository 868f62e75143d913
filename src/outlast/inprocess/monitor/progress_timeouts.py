"""The soft and the hard timeout; the hard one leads to SIGTERM, then SIGKILL.

In user code the limits are for its progress. The waits of the library (`Activity.WAITING`) have
timeouts of their own; there the hard one is for the heartbeat thread. A process that is stopped, or
in which some thread keeps the GIL, cannot apply its own timeouts either, and the other ranks would
wait for it at a barrier until they fail.
"""

from __future__ import annotations

import math
import signal

from outlast.clock import Clock
from outlast.inprocess.monitor.config import MonitorPlan
from outlast.inprocess.monitor.fault_reports import FaultReports
from outlast.inprocess.progress.shared_page import Activity, SharedPage
from outlast.system.processes import send_signal

# The hard timeout under an adaptive soft timeout: this many soft timeouts, and at least this long.
_HARD_PER_SOFT = 10.0
_HARD_AT_LEAST_S = 5.0

# The heartbeat thread has no work that takes long; a busy machine may still keep it from running.
_SILENT_AT_LEAST_S = 5.0

_TIMED = (Activity.FUNCTION, Activity.USER, Activity.LEAVING)


def timeouts_in_force(plan: MonitorPlan, page: SharedPage) -> tuple[float, float]:
    """Seconds without progress until the soft and the hard timeout, in the current activity."""
    if page.activity != Activity.FUNCTION:
        return plan.hard, plan.hard
    if page.long_limit:
        soft = page.long_limit if page.long_limit > 0 else plan.soft
        return soft, max(plan.hard, soft + plan.hard - plan.soft)
    if not page.soft_limit:
        return plan.soft, plan.hard
    # The hard timeout follows a learned soft timeout, because a rank that holds the GIL can only
    # be terminated. Terminating a process costs more than an interrupt, so it gets more time.
    soft = page.soft_limit
    return soft, min(plan.hard, max(_HARD_PER_SOFT * soft, _HARD_AT_LEAST_S))


class ProgressTimeouts:
    """Applies the timeouts to the main process; `pidfd` is `None` if the process has ended."""

    def __init__(
        self, plan: MonitorPlan, clock: Clock, reports: FaultReports, pidfd: int | None
    ) -> None:
        self._plan, self._page, self._clock = plan, plan.page, clock
        self._reports, self._pidfd = reports, pidfd
        self._kill_at: float | None = None
        self._silent = max(plan.hard, _SILENT_AT_LEAST_S)
        self._continued = 0.0

    def continued(self) -> None:
        """This process could not run for a while: its host was paused, or all processes of the job
        were stopped. Then the main process could not either; all timeouts begin again.
        """
        self._continued = self._clock.now()

    def next_check(self) -> float:
        """The time of the next timeout, if the main process makes no progress until then."""
        page = self._page
        if self._kill_at is not None:
            return self._kill_at
        if page.activity not in _TIMED:
            return self._silent_at()
        soft, hard = timeouts_in_force(self._plan, page)
        limit = hard if page.reported_soft == page.iteration else soft
        return max(page.progress, self._continued) + limit

    def check(self) -> None:
        """Reports a soft timeout, and terminates the main process at the hard one."""
        page, now = self._page, self._clock.now()
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._kill_at = math.inf
                self._signal(signal.SIGKILL)
            return
        if page.activity not in _TIMED:
            late = now - self._silent_at()
            if late >= 0:
                self._terminate(self._silent + late, now, "no Python code has run")
            return
        idle = now - max(page.progress, self._continued)
        soft, hard = timeouts_in_force(self._plan, page)
        if idle >= hard:
            self._terminate(idle, now, "no progress")
        elif (
            page.activity == Activity.FUNCTION
            and idle >= soft
            and page.reported_soft != page.iteration
        ):
            self._reports.soft_timeout(idle, soft)

    def _silent_at(self) -> float:
        """When the heartbeat thread of a process in a wait of the library has not run for too long.

        The order of the reads: the thread may end meanwhile, which sets `heartbeat` to 0, so it is
        read once. If it is old because a long phase has just ended, in which the thread could not
        run, `progress` is new: `SharedPage.enter` writes it before the activity.
        """
        page = self._page
        heartbeat = page.heartbeat
        if not heartbeat or page.activity != Activity.WAITING:
            return math.inf
        return max(heartbeat, page.progress, self._continued) + self._silent

    def _terminate(self, idle: float, now: float, what: str) -> None:
        """Sends SIGTERM; SIGKILL follows after the grace time. The loop continues, and reports the
        death once the process has died: a process that exits in an orderly way, through its SIGTERM
        handler, dismisses its monitor and gets no SIGKILL.
        """
        self._page.killed_hard = 1
        self._reports.hard_timeout(idle, what)
        self._kill_at = now + self._plan.grace
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        assert self._pidfd is not None
        send_signal(self._pidfd, number)
