"""The deaths of workers, the decision on each, and how many restarts are used."""

from __future__ import annotations

import dataclasses

from outlast.launch.agent import job_summary
from outlast.launch.agent.decisions import Decision, JobRecord, JobState, decide, replacements
from outlast.launch.agent.job_summary import Death
from outlast.launch.workers.worker import Worker


class DeathLog:
    """The deaths of a job, in the order of the decisions on them."""

    def __init__(self, max_restarts: int | None) -> None:
        self._max_restarts = max_restarts
        self._used = 0
        self.deaths: list[Death] = []

    def decide(self, worker: Worker, exit_code: int, job: JobRecord) -> Decision:
        """What follows from a death in a running job; counts the restart if it takes one."""
        decision = decide(exit_code, worker.pid, job, self._used, self._max_restarts)
        if decision in (Decision.REPLACED, Decision.RESTARTED):
            self._used += 1
        return decision

    def record(self, worker: Worker, exit_code: int, when: float, decision: Decision) -> Death:
        """Keep a death, with the last output of the worker."""
        last_output, source = worker.last_output()
        death = Death(
            rank=worker.slot.local_rank,
            pid=worker.pid,
            exit_code=exit_code,
            when=when,
            decision=decision,
            last_output=last_output,
            source=source,
        )
        self.deaths.append(death)
        return death

    def not_replaced(self, death: Death) -> None:
        """Correct a death that was to be replaced and was not."""
        self.deaths[self.deaths.index(death)] = dataclasses.replace(death, decision=Decision.LOST)

    def budget(self, job: JobRecord) -> str:
        """How many restarts or replacements are used, as text."""
        if job.state is JobState.PLAIN:
            return f"restart {self._used} of {self._max_restarts}"
        return f"replacement {self._used} of {replacements(self._max_restarts)}"

    def cause(self, job: JobRecord) -> Death | None:
        """The first failure from which the job did not recover."""
        return job_summary.first_cause(self.deaths, job)
