"""Starts the standby processes once they can be of use: when a wrapped function runs."""

from __future__ import annotations

from outlast.launch.agent.decisions import JobState
from outlast.launch.agent.resources import JobResources
from outlast.launch.event_loop import Timer

_CHECK_S = 0.5


class StandbyStart:
    """Fills the pool of standby processes when the script has called a function with `Wrapper`.

    With any other script, a failure restarts all workers, and standbys would save no time. And as
    long as the workers import their modules, standbys would only be in their way.
    """

    def __init__(self, resources: JobResources) -> None:
        self._resources = resources
        self._timer: Timer | None = None

    def begin(self) -> None:
        """Look at the job's state until a wrapped function runs or has ended, now that workers
        have been started.
        """
        standbys = self._resources.workers.standbys
        standbys.open()
        if self._timer is None and standbys.size:
            self._timer = self._resources.loop.call_later(_CHECK_S, self._check)

    def _check(self) -> None:
        self._timer = None
        standbys = self._resources.workers.standbys
        if standbys.closed:
            return
        state = self._resources.coordinator.keys.job().state
        if state is JobState.RUNNING:
            standbys.fill()
        elif state is JobState.PLAIN:
            self.begin()
