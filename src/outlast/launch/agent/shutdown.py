"""Ends the workers on SIGTERM, on another signal or after a failure, and then their helpers:
terminate, wait, kill.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from outlast.launch.agent.descendants import (
    BETWEEN_ATTEMPTS,
    KILL_NOW,
    DescendantShutdown,
    at_end_of_job,
    snapshot_holders,
)
from outlast.launch.agent.resources import JobResources
from outlast.launch.event_loop import Timer


class Shutdown:
    """Ends workers, then their helpers, regardless of the reason.

    Calls `all_ended` when none are left.
    """

    def __init__(self, resources: JobResources, all_ended: Callable[[], None]) -> None:
        self._resources = resources
        self._all_ended = all_ended
        self._grace: Timer | None = None
        self._helpers: DescendantShutdown | None = None
        self._kill_at_once = False

    def end_workers(self, number: signal.Signals) -> None:
        """Send the workers a signal, and SIGKILL to those still running after the grace time. If a
        worker announces its last save in that time, they have in addition as long as that may take.
        """
        self._resources.workers.send(number)
        self._cancel_grace()
        grace_s = self._resources.job.grace_s
        self._grace = self._resources.loop.call_later(grace_s, self._grace_is_over)

    def kill_now(self) -> None:
        """Kill workers and helpers without further waiting."""
        self._kill_at_once = True
        self._kill_workers()
        if self._helpers is not None:
            self._helpers.kill_now()

    def end_helpers(self, patient: bool) -> None:
        """End the helpers, now that all workers have ended; no effect if already begun."""
        self._cancel_grace()
        if self._helpers is not None:
            return
        steps = at_end_of_job(self._resources.job.grace_s) if patient else BETWEEN_ATTEMPTS
        steps = KILL_NOW if self._kill_at_once else steps
        loop, ended = self._resources.loop, self._helpers_ended
        keep = self._resources.own_children if patient else self._kept_between_attempts
        self._helpers = DescendantShutdown(loop, keep, steps, ended)
        self._helpers.start()

    def children_reaped(self) -> None:
        """Call after children have been reaped."""
        if self._helpers is not None:
            self._helpers.check()

    def _kept_between_attempts(self) -> list[int]:
        own = self._resources.own_children()
        return own if self._kill_at_once else [*own, *snapshot_holders()]

    def _cancel_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()

    def _grace_is_over(self) -> None:
        save_s = self._resources.coordinator.keys.last_save_s() if self._resources.workers else None
        if save_s is None:
            self._kill_workers()
            return
        self._resources.console.say(f"the job is saving: it has {save_s:g} s more")
        self._grace = self._resources.loop.call_later(save_s, self._kill_workers)

    def _kill_workers(self) -> None:
        workers = self._resources.workers
        if workers:
            ranks = ", ".join(str(worker.rank) for worker in workers)
            self._resources.console.say(f"still running, killed: rank {ranks}")
            workers.send(signal.SIGKILL)

    def _helpers_ended(self, left: list[int]) -> None:
        self._helpers = None
        if left:
            self._resources.console.say(f"left behind, cannot be killed: {left}")
        self._all_ended()
