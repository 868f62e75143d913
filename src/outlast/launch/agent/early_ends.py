"""Workers that end before they have reached the wrapped function, where the others wait for them.

The monitor process of a worker reports its end to the others; it runs from the call of the wrapped
function on. Until then, the launcher is the only one that knows of the end.
"""

from __future__ import annotations

from outlast.launch.agent.decisions import JobRecord, JobState
from outlast.launch.agent.resources import JobResources
from outlast.launch.config.placement import Placement
from outlast.launch.event_loop import Timer
from outlast.launch.workers.worker import Worker
from outlast.system.error_text import exit_text

_CHECK_S = 0.5


class EarlyEnds:
    """Tells the members of the call which ranks have ended early and are not replaced."""

    def __init__(self, resources: JobResources) -> None:
        self._resources = resources
        self._world_size = 0
        self._ended: list[tuple[Worker, int]] = []
        self._timer: Timer | None = None

    def begin(self, placement: Placement) -> None:
        """An attempt begins."""
        self._world_size = placement.places * self._resources.job.nproc
        self._ended.clear()

    def is_early(self, worker: Worker, job: JobRecord) -> bool:
        """Whether the script has a wrapped function that no process of this rank has reached."""
        if job.state is JobState.PLAIN:
            return self._resources.job.program.wrapped
        running = job.state is JobState.RUNNING and bool(job.prefix)
        return running and not self._resources.coordinator.keys.has_come(job, worker.slot.rank)

    def ended(self, worker: Worker, exit_code: int) -> None:
        """A worker has ended, and is not replaced. If it has not reached the call, the others are
        told so, as soon as one of them has.
        """
        self._ended.append((worker, exit_code))
        self._check()

    def _check(self) -> None:
        job = self._resources.coordinator.keys.job()
        if self._resources.workers and job.state is JobState.PLAIN:
            if self._timer is None or not self._timer.pending:
                self._timer = self._resources.loop.call_later(_CHECK_S, self._check)
            return
        for worker, exit_code in self._ended:
            if self._resources.workers and self.is_early(worker, job):
                self._tell(worker, exit_code)
        self._ended.clear()

    def _tell(self, worker: Worker, exit_code: int) -> None:
        rank = worker.slot.rank
        how = f"{exit_text(exit_code)} before it reached the wrapped function"
        coordinator = self._resources.coordinator
        if exit_code == 0:  # any other end was announced
            what = f"rank {rank} (pid {worker.pid}) {how}"
            self._resources.console.say(f"{what}, where the other ranks wait for it")
            coordinator.give_up(frozenset({rank}))
        cause = f"process {worker.pid} {how}"
        coordinator.keys.will_not_come(rank, self._world_size, cause)
