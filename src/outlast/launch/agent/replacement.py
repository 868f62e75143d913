"""Replaces a dead worker with a new process of the same rank, at once or after a back-off."""

from __future__ import annotations

from collections.abc import Callable

from outlast.errors import LaunchError
from outlast.launch.agent.death_log import Death, DeathLog
from outlast.launch.agent.decisions import JobState
from outlast.launch.agent.resources import JobResources
from outlast.launch.event_loop import Timer


class Replacements:
    """The replacements that wait for their back-off.

    Args:
        deaths: the log to correct if a dead worker is not replaced after all.
        given_up: called when a replacement has been given up.
    """

    def __init__(
        self, resources: JobResources, deaths: DeathLog, given_up: Callable[[], None]
    ) -> None:
        self._resources = resources
        self._deaths = deaths
        self._given_up = given_up
        self._waiting: list[tuple[Timer, Death]] = []

    @property
    def pending(self) -> bool:
        """Whether a replacement waits for its back-off."""
        return bool(self._waiting)

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks whose replacements wait for their back-off."""
        return frozenset(death.rank for _, death in self._waiting)

    @property
    def are_useful(self) -> bool:
        """Whether the job still waits for its ranks: it may have ended during a back-off."""
        state = self._resources.coordinator.keys.job().state
        wrapped = self._resources.job.program.wrapped
        return state is JobState.RUNNING or (wrapped and state is JobState.PLAIN)

    def schedule(self, death: Death) -> None:
        """Replace a dead worker, after the back-off of its rank."""
        delay_s = self._resources.workers.delay_s(death.local_rank)
        if delay_s == 0:
            self._replace(death)
            return
        self._resources.console.say(
            f"rank {death.rank} died soon after its start again: replaced in {delay_s:g} s"
        )
        timer = self._resources.loop.call_later(delay_s, lambda: self._replace(death))
        self._waiting.append((timer, death))

    def cancel(self) -> None:
        """Give up the replacements that still wait."""
        for timer, death in self._waiting:
            timer.cancel()
            self._lost(death)
        self._waiting.clear()

    def _replace(self, death: Death) -> None:
        self._waiting = [item for item in self._waiting if item[1] is not death]
        resources = self._resources
        if self.are_useful:
            try:
                worker = resources.workers.replace(death.local_rank)
                standby = ", a standby process" if worker.was_standby else ""
                resources.console.say(f"rank {death.rank} is now pid {worker.pid}{standby}")
                return
            except LaunchError as e:  # the survivors may still finish the job
                resources.console.say(f"{e}: it is not replaced")
        self._lost(death)
        self._given_up()

    def _lost(self, death: Death) -> None:
        self._resources.coordinator.failed(self._deaths.not_replaced(death))
