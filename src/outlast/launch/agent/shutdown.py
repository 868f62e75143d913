"""Ends the workers on SIGTERM, on another signal or after a failure, and then their helpers:
terminate, wait, kill.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

import psutil

from outlast.launch.agent.resources import JobResources
from outlast.launch.event_loop import Timer
from outlast.launch.workers.descendants import (
    KILL_S,
    LINGER_S,
    TERMINATE_S,
    descendants,
    snapshot_holders,
)

_Steps = Iterator[tuple[float, signal.Signals | None]]
"""Seconds to wait after each signal; `None` sends no signal."""


class Shutdown:
    """Ends workers, then their helpers, regardless of the reason; calls `all_ended` when none are
    left.

    `children_reaped`, called after every reaped child, drives the second part: when a descendant
    ends, its children become children of this process, so the end of the last one is always seen.
    """

    def __init__(self, resources: JobResources, all_ended: Callable[[], None]) -> None:
        self._resources, self._all_ended = resources, all_ended
        self._timer = Timer()  # of the grace time of the workers, or of a step
        self._steps: _Steps | None = None  # set while helpers are being ended
        self._signal: signal.Signals | None = None
        self._between_attempts = False
        self._kill_at_once = False
        self.has_killed = False  # the workers that were still running

    def end_workers(self, number: signal.Signals) -> None:
        """Send the workers a signal, and SIGKILL to those still running after the grace time. If a
        worker announces its last save in that time, they have in addition as long as that may take.
        """
        self._resources.workers.send(number)
        self._call_later(self._resources.job.grace_s, self._grace_is_over)

    def kill_now(self) -> None:
        self._kill_at_once = True
        self._kill_workers()
        if self._steps is not None:
            self._begin_steps()

    def end_helpers(self, patient: bool) -> None:
        """End the helpers, now that all workers have ended; no effect if already begun."""
        if self._steps is None:
            self._between_attempts = not patient
            self._begin_steps()

    def children_reaped(self) -> None:
        if self._steps is None:
            return
        left = self._left()
        if not left:
            self._helpers_ended([])
        elif self._signal is signal.SIGKILL:  # also new ones
            self._send(left)

    def _begin_steps(self) -> None:
        kill = (KILL_S, signal.SIGKILL)
        if self._kill_at_once:
            self._steps = iter([kill])
        elif self._between_attempts:
            self._steps = iter([(LINGER_S, signal.SIGTERM), kill])
        else:
            terminate_s = min(TERMINATE_S, self._resources.job.grace_s)
            self._steps = iter([(LINGER_S, None), (terminate_s, signal.SIGTERM), kill])
        self._next_step()

    def _next_step(self) -> None:
        if self._steps is None:
            return
        left = self._left()
        wait_s, self._signal = next(self._steps, (None, None))
        if not left or wait_s is None:
            self._helpers_ended([process.pid for process in left])
            return
        self._call_later(wait_s, self._next_step)
        self._send(left)

    def _left(self) -> list[psutil.Process]:
        keep = self._resources.own_children()
        if self._between_attempts and not self._kill_at_once:
            keep += snapshot_holders()
        return descendants(keep)

    def _send(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            if self._signal is not None:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(self._signal)  # checks that the pid was not reused

    def _helpers_ended(self, left: list[int]) -> None:
        self._steps = None
        self._timer.cancel()
        if left:
            self._resources.console.say(f"left behind, cannot be killed: {left}")
        self._all_ended()

    def _grace_is_over(self) -> None:
        save_s = self._resources.coordinator.keys.last_save_s() if self._resources.workers else None
        if save_s is None:
            self._kill_workers()
            return
        self._resources.console.say(f"the job is saving: it has {save_s:g} s more")
        self._call_later(save_s, self._kill_workers)

    def _kill_workers(self) -> None:
        workers = self._resources.workers
        if workers:
            ranks = ", ".join(str(worker.rank) for worker in workers)
            self._resources.console.say(f"still running, killed: rank {ranks}")
            self.has_killed = True
            workers.send(signal.SIGKILL)

    def _call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self._timer.cancel()
        self._timer = self._resources.loop.call_later(seconds, callback)
