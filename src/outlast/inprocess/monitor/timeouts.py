"""The soft and the hard timeout; the hard one leads to SIGTERM, then SIGKILL.

In the function, a rank makes progress while it executes Python code, or uses the CPU in C code that
waits for nobody (`Blocked`, `CpuTime`). Without progress for the soft timeout, it hangs, unless it
waits for other ranks of which one makes progress (`IdleRanks`). Of two limits that hold whatever a
rank does, one is for a rank that has pinged, and is between pings; the other one is for a wait.

A declared long phase has limits of its own, for the work of its rank: not for a process that is
stopped, and not while the rank only waits for others. Such a rank counts among the idle ones after
the usual soft timeout, so a hang is found as outside of the phase. What is a wait, and what is
work, the library says itself (`coordination/waits.py`); besides, a rank in `torch.distributed`
whose process uses no CPU time waits.

In other user code the limits are for its progress. The waits of the library (`Activity.WAITING`)
have timeouts of their own; there the hard one is for the heartbeat thread. A process that is
stopped, or in which some thread keeps the GIL, cannot apply its own timeouts either, and the other
ranks would wait for it at a barrier until they fail.
"""

from __future__ import annotations

import math
import signal
from typing import NamedTuple

from outlast.clock import Clock
from outlast.inprocess.monitor.cpu_time import CpuTime
from outlast.inprocess.monitor.native_frames import NativeFrames
from outlast.inprocess.monitor.reports import FaultReports, MonitorPlan, StoreAccess, write_for
from outlast.inprocess.monitor.shared_page import NOTICE_AFTER_S, Activity, Blocked, SharedPage
from outlast.inprocess.timeouts import Durations
from outlast.system.processes import is_stopped, send_signal

# The hard timeout under an adaptive soft timeout: this many soft timeouts, and at least this long.
_HARD_PER_SOFT = 10.0
_HARD_AT_LEAST_S = 5.0

# The heartbeat thread has no work that takes long; a busy machine may still keep it from running.
_SILENT_AT_LEAST_S = 5.0

_TIMED = (Activity.FUNCTION, Activity.USER, Activity.LEAVING)
_LOOKS = 4  # at the CPU time, within a learned limit below a second

# A learned limit below this is one for the time without work: see `_works`.
_CERTAIN_S = 1.0


class Limits(NamedTuple):
    """Seconds in the current activity."""

    soft: float  # without progress, until the soft timeout
    hard: float  # the same, until the hard timeout
    ping: float  # between two pings, whatever the rank does, until the soft timeout


def limits_in_force(durations: Durations, page: SharedPage, activity: int) -> Limits:
    """The limits of the activity that was read from the page."""
    soft, hard, ping = durations.soft, durations.hard, durations.ping
    if activity != Activity.FUNCTION:
        return Limits(hard, hard, math.inf)
    phase = page.long_limit
    if phase > 0:
        return Limits(phase, max(hard, phase + hard - soft), phase)
    if phase:
        return Limits(soft, hard, max(soft, ping))
    if not page.soft_limit:
        return Limits(soft, hard, ping)
    # The hard timeout follows a learned soft timeout, because a rank that holds the GIL can only
    # be terminated. Terminating a process costs more than an interrupt, so it gets more time.
    learned = page.soft_limit
    return Limits(learned, min(hard, max(_HARD_PER_SOFT * learned, _HARD_AT_LEAST_S)), learned)


class IdleRanks:
    """Whether all ranks wait: only then does a rank that waits for others show that one of them
    hangs.

    A rank that has waited for the soft timeout counts itself in the store, and takes itself out
    again when it goes on. The one that completes the number, together with the ranks that have
    returned from the function, reports the hang. That may also be one that returns, and reports
    nothing: so each rank that waits reads the number again once in every soft timeout. A rank that
    goes on is known to do so only a little later, by its heartbeat thread, then by its monitor
    process: so the number is read a second time before it is believed.
    A number that is complete is read again after `confirm` seconds (`wait` may be given another
    value), and one that is not, after `again` seconds.
    """

    def __init__(
        self, page: SharedPage, store: StoreAccess, clock: Clock, confirm: float, again: float
    ) -> None:
        self._page, self._store = page, store
        self._clock, self._confirm, self._again = clock, confirm, again
        self._counted_in = -1  # the iteration
        self._complete_at: float | None = None  # when this rank has found the number complete
        self._look_at = 0.0

    def wait(self, confirm: float | None = None) -> bool:
        """Counts this rank; returns whether it is to report that all wait. Call it regularly."""
        iteration, now = self._page.iteration, self._clock.now()
        confirm = self._confirm if confirm is None else confirm
        is_new = self._counted_in != iteration
        if is_new or (self._complete_at is None and now >= self._look_at):
            self._counted_in, self._look_at = iteration, now + self._again
            self._complete_at = now if self._change(iteration, int(is_new)) else None
        if self._complete_at is None or now - self._complete_at < confirm:
            return False
        self._complete_at = None
        return self._change(iteration, 0)

    def go_on(self) -> None:
        iteration, self._counted_in = self._counted_in, -1
        if iteration >= 0 and iteration == self._page.iteration:
            self._change(iteration, -1)

    def _change(self, iteration: int, amount: int) -> bool:
        membership, members = self._store.membership, self._page.world_size
        # Without the store, no other rank can know better.
        return self._store.perform(membership.count_idle(iteration, amount, members)) is not False


class ProgressTimeouts:
    """Applies the timeouts to the main process `main`; `pidfd` is `None` if it has ended."""

    def __init__(
        self,
        plan: MonitorPlan,
        main: int,
        clock: Clock,
        reports: FaultReports,
        pidfd: int | None,
        idle_ranks: IdleRanks,
        cpu: CpuTime,
        frames: NativeFrames,
    ) -> None:
        self._durations, self._page, self._clock = plan.durations, plan.page, clock
        self._main, self._reports, self._pidfd = main, reports, pidfd
        self._idle_ranks, self._cpu, self._frames = idle_ranks, cpu, frames
        self._terminating = False
        self._kill_at: float | None = None
        self._silent = max(self._durations.hard, _SILENT_AT_LEAST_S)
        self._continued = 0.0
        self._stopped_at = math.inf
        self._queued_at = 0.0, 0.0  # a ping, and how long the rank had waited for a core then

    def continued(self) -> None:
        """This process was paused, and so was the main process: all timeouts begin again."""
        self._continued = self._clock.now()

    def next_check(self) -> float:
        """The time of the next timeout, if the main process makes no progress until then."""
        page, activity = self._page, self._page.activity
        if self._terminating:
            return self._frames.until if self._kill_at is None else self._kill_at
        if activity not in _TIMED:
            return self._silent_at()
        soft, hard, ping = limits_in_force(self._durations, page, activity)
        if page.reported_soft == page.iteration:
            soft, ping = hard, ping + hard - soft
        due = max(page.progress, self._continued) + soft
        if activity == Activity.FUNCTION and page.pings:
            due = min(due, max(page.pinged, self._continued) + ping)
        now = self._clock.now()
        if limit := self._short_limit():
            half = max(page.pinged, self._continued) + limit / 2
            return half if half > now else now + limit / _LOOKS
        # What is due already is not a hang so far.
        return due if due > now else now + self._durations.monitor_interval

    def check(self) -> None:
        """Reports a soft timeout, and terminates the main process at the hard one.

        The activity is read once, before all else: `SharedPage.enter` writes it last, so the
        timestamps read after it are those of this activity or newer. Read a second time, it could
        be that of a rank which has just been told to leave, judged by the age of its wait.
        """
        page, activity = self._page, self._page.activity
        in_function, now = activity == Activity.FUNCTION, self._clock.now()
        if self._terminating:
            if self._kill_at is None:
                self._signal_once_read(now)
            elif now >= self._kill_at:
                self._kill_at = math.inf
                self._signal(signal.SIGKILL)
            return
        if not in_function:
            self._idle_ranks.go_on()
        if activity not in _TIMED:
            late = now - self._silent_at()
            if late >= 0:
                self._terminate(self._silent + late, now, "no Python code has run")
            return
        soft, hard, ping = limits_in_force(self._durations, page, activity)
        stopped = self._stopped(now, soft) if in_function and page.long_limit else 0.0
        if stopped:
            self._hung(stopped, self._durations.soft, self._durations.hard)
            return
        if in_function and self._works(now):
            return
        if activity == Activity.LEAVING:
            idle = now - max(page.progress, self._continued)
            if idle >= hard:
                self._terminate(idle, now, "no progress")
            return
        idle = now - max(page.progress, self._continued, self._computed(now, soft))
        waited = self._waited(now) if in_function and page.long_limit else 0.0
        if idle < soft and waited < self._durations.soft:
            self._idle_ranks.go_on()
        unpinged = idle
        if page.pings and in_function:
            unpinged = now - max(page.pinged, self._continued)
        if unpinged >= ping:
            # A learned limit is a soft timeout by its name.
            what = "progress" if ping == soft or not page.pings else "ping"
            self._hung(unpinged, ping, ping + hard - soft, what)
        elif idle >= soft and (frozen := self._frozen()) >= soft:
            self._hung(min(idle, frozen), soft, hard)
        elif idle >= soft and (not in_function or page.blocked == Blocked.ELSEWHERE):
            self._hung(idle, soft, hard)  # it waits for no other rank
        elif idle >= soft and page.blocked != Blocked.NO and self._idle_ranks.wait():
            self._hung(idle, soft, math.inf)  # it waits, and no rank makes progress
        elif waited >= self._durations.soft and self._idle_ranks.wait():
            self._hung(waited, self._durations.soft, math.inf)  # as the last one

    def _short_limit(self) -> float:
        """A learned limit that is in force and below a second; else 0."""
        page = self._page
        is_learned = page.activity == Activity.FUNCTION and not page.long_limit
        return page.soft_limit if is_learned and page.soft_limit < _CERTAIN_S else 0.0

    def _works(self, now: float) -> bool:
        """Of a rank whose learned limit is below a second: whether it, or a rank that it may wait
        for, works. A collection of garbage takes that long, or a scheduler with more threads than
        cores. So a rank is late if its process has used no CPU time for the limit, nor waited for
        a core; and all are, since the one that works is among those for which the others wait.
        What keeps a core busy, as an endless loop does, is late after a second, without the time in
        which it waited for a core. Those that wait for it leave that to its own monitor, unless it
        takes until half of the hard timeout.
        """
        limit, page = self._short_limit(), self._page
        if not limit:
            return False
        pinged = max(page.pinged, self._continued)
        self._cpu.sample(0, own=True, children=False, queued=True, every=limit / _LOOKS)
        if self._queued_at[0] != pinged:
            self._queued_at = pinged, self._cpu.queued
        if min(now - pinged, now - self._cpu.progress) >= limit:
            hard = limits_in_force(self._durations, page, Activity.FUNCTION).hard
            return now - pinged < hard / 2 and not self._idle_ranks.wait(0.0)
        self._idle_ranks.go_on()
        return now - pinged - (self._cpu.queued - self._queued_at[1]) < _CERTAIN_S

    def _waited(self, now: float) -> float:
        """For how long the rank has only waited for others, in a long phase."""
        page, since = self._page, 0.0
        if page.works:
            return 0.0
        if page.blocked == Blocked.COLLECTIVE:  # a large message on its way uses the CPU
            self._cpu.sample(0, own=True, children=False)
            since = self._cpu.progress
        elif not page.waits:
            return 0.0
        return now - max(page.progress, page.worked, since, self._continued)

    def _stopped(self, now: float, soft: float) -> float:
        """How long the process is stopped in a long phase, if too long; else 0. Call regularly."""
        if self._durations.soft >= soft or not is_stopped(self._main):
            self._stopped_at = math.inf
            return 0.0
        self._stopped_at = min(self._stopped_at, now)
        stopped = now - max(self._stopped_at, self._continued)
        return stopped if stopped >= self._durations.soft else 0.0

    def _hung(self, idle: float, soft: float, hard: float, what: str = "progress") -> None:
        page = self._page
        if idle >= hard:
            self._terminate(idle, self._clock.now(), f"no {what}")
        elif page.activity == Activity.FUNCTION and page.reported_soft != page.iteration:
            self._reports.soft_timeout(idle, soft, what)

    def _frozen(self) -> float:
        """For how long the process has run no Python code in any thread, in seconds."""
        page = self._page
        heartbeat = page.heartbeat
        if not heartbeat:
            return math.inf
        return self._clock.now() - max(heartbeat, page.progress, self._continued)

    def _computed(self, now: float, soft: float) -> float:
        """When CPU time was last used in a way that is progress."""
        page = self._page
        if now - max(page.progress, self._continued) < soft / 4:
            return 0.0
        frozen = self._frozen() >= soft / 2
        counts = frozen or page.blocked in (Blocked.UNKNOWN, Blocked.ELSEWHERE)
        if counts:
            self._cpu.sample(page.function_thread, own=True, children=not frozen)
        return self._cpu.progress

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
        """Sends SIGTERM, once py-spy has read where the process is; SIGKILL follows after the grace
        time. The loop continues, and reports the death once the process has died: a process that
        exits in an orderly way, through its SIGTERM handler, dismisses its monitor and gets no
        SIGKILL.
        """
        self._page.killed_hard = 1
        self._terminating = True
        self._reports.hard_timeout(idle, what)
        self._frames.begin(self._page.function_thread)
        self._signal_once_read(now)

    def _signal_once_read(self, now: float) -> None:
        """With SIGCONT: without it, a stopped process would not get the other signal."""
        if not self._frames.is_over():
            return
        self._reports.native_frames(self._frames.said)
        self._kill_at = now + self._durations.grace
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._pidfd is not None
        send_signal(self._pidfd, number)


class FrozenNotice:
    """One line for a main process that cannot write it itself: it is stopped or holds the GIL."""

    def __init__(self, plan: MonitorPlan, main: int, clock: Clock, host: str) -> None:
        self._durations, self._page, self._main = plan.durations, plan.page, main
        self._clock, self._host = clock, host
        self._told = 0.0  # the timestamp after which the line was written

    def check(self) -> None:
        """Call it regularly. Writes one line, until the process runs again."""
        page = self._page
        # Before the heartbeat thread's first interval is over, there is no timestamp of it.
        heartbeat = page.heartbeat or page.progress
        idle = self._clock.now() - heartbeat
        timed = page.activity == Activity.FUNCTION
        if not timed or heartbeat == self._told or idle < NOTICE_AFTER_S:
            return
        stopped, long = is_stopped(self._main), page.long_limit
        if long and not stopped:
            return
        self._told = heartbeat
        limits = limits_in_force(self._durations, page, Activity.FUNCTION)
        hard = self._durations.hard if long else limits.hard
        why = "is stopped (SIGSTOP);" if stopped else "holds the GIL in C code; unless it computes,"
        write_for(
            self._main,
            f"rank {self._page.rank} on {self._host}: no progress for {idle:.0f} s: process "
            f"{self._main} {why} after {hard:.0f} s it is ended",
        )
