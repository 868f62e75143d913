"""`outlast drain --rank N`: a rank moves to another process of its host, at the end of a step.

The successor is a standby process if one is ready, or else a new one. What follows is a move, as
between hosts (`coordination.moves`): it imports and asks to join while the rank trains, takes the
state over, and the old process ends with exit code 0. One that fails before that is started again.
"""

from __future__ import annotations

import collections
import os
import signal

from outlast.coordination.job_record import JobState
from outlast.errors import LaunchError
from outlast.launch.agent.resources import JobResources
from outlast.launch.workers.worker_group import Worker
from outlast.system.error_text import exit_text

_ATTEMPTS = 3


class RankMoves:
    """The moves of ranks of this host."""

    def __init__(self, resources: JobResources) -> None:
        self._resources = resources
        self._failures: collections.Counter[int] = collections.Counter()

    def begin(self, rank: int, reason: str) -> str:
        """Begins the move of a rank; returns why it cannot move, if so."""
        workers, coordinator = self._resources.workers, self._resources.coordinator
        worker = next((each for each in workers if each.rank == rank and not each.settled), None)
        if worker is None:
            ranks = ", ".join(map(str, sorted({each.rank for each in workers})))
            return (
                f"no rank {rank} runs on {self._resources.host}; those that do: {ranks or 'none'}"
            )
        if coordinator.leaves or worker.leaves is not None:
            return f"rank {rank} is about to move already"
        job = coordinator.keys.job()
        ends = job.state is not JobState.RUNNING or job.stopping or workers.standbys.closed
        if ends or coordinator.keys.least(job) < 0:
            return f"rank {rank} cannot move: the job is not in the steps of an `outlast.Job`"
        if not self._trains(rank, coordinator.host_id):
            return f"rank {rank} cannot move: its process has not joined the training yet"
        worker.leaves = reason
        self._start(worker)
        return ""

    def done(self, worker: Worker) -> bool:
        """Whether the end of this worker, with exit code 0, belongs to a move."""
        if worker.successor is None:
            return self.failed(worker, 0)
        if self._resources.coordinator.keys.job().state is JobState.RUNNING:
            now = worker.successor.pid
            self._say(f"rank {worker.rank} has moved from pid {worker.pid} to pid {now}")
        return True

    def failed(self, worker: Worker, code: int) -> bool:
        """Whether this worker, which has ended, was to succeed one that still has its rank: of this
        host, or of another one that is to leave. Such a one is started again, a few times.
        """
        workers, coordinator = self._resources.workers, self._resources.coordinator
        leaver = next((each for each in workers if each.successor is worker), None)
        host = workers.takes_from if leaver is None else coordinator.host_id
        if not self._trains(worker.rank, host):
            return False
        error = worker.last_output()[0].rpartition("\n")[2]
        what = f"the successor of rank {worker.rank} (pid {worker.pid}) {exit_text(code)}"
        what += f": {error}" if error else ""
        self._say(what)
        self._failures[worker.rank] += 1
        again = self._failures[worker.rank] % _ATTEMPTS > 0
        if leaver is None and again:
            workers.replace(worker.local_rank)
        elif leaver is None:
            coordinator.leave(what)
        else:
            leaver.successor = None
            if again and not coordinator.leaves:
                self._start(leaver)
            elif not coordinator.leaves:
                self._stay(leaver)
        return True

    def cancel(self) -> None:
        """The ranks move to another host instead: of those that wait to move here, successors that
        have not asked them to leave yet are ended.
        """
        for worker in self._resources.workers:
            if worker.successor and self._trains(worker.rank, self._resources.coordinator.host_id):
                os.kill(worker.successor.pid, signal.SIGKILL)

    def takes_over(self, worker: Worker) -> bool:
        """Whether the successor of this worker, which has died, is there to replace it."""
        successor = worker.successor
        there = successor is not None and self._resources.workers.get(successor.pid) is successor
        if successor is not None and there:
            self._say(f"rank {worker.rank} is now pid {successor.pid}, which was to succeed it")
        return there

    def _start(self, leaver: Worker) -> None:
        try:
            leaver.successor = new = self._resources.workers.replace(leaver.local_rank)
        except LaunchError as e:
            self._say(str(e))
            self._stay(leaver)
            return
        standby = ", a standby process" if new.was_standby else ""
        self._say(
            f"rank {leaver.rank} moves from pid {leaver.pid} to pid {new.pid}{standby}, at the end "
            f"of a step: {leaver.leaves}"
        )

    def _stay(self, leaver: Worker) -> None:
        leaver.leaves = None
        self._say(f"rank {leaver.rank} does not move: it stays in pid {leaver.pid}")

    def _trains(self, rank: int, host: str | None) -> bool:
        """Whether the rank is in the training on this host, and was not asked to leave."""
        # First: this is asked at each death, and a question to the store delays its replacement.
        if host is None:
            return False
        keys = self._resources.coordinator.keys
        job = keys.job()
        return job.state is JobState.RUNNING and keys.trains(job, host, range(rank, rank + 1))

    def _say(self, line: str) -> None:
        self._resources.console.say(line)
