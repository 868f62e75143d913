"""Who died in a job, what came of it, and how much of the restarts is used."""

from __future__ import annotations

import dataclasses

from outlast.launch.agent import outcome
from outlast.launch.agent.decisions import Fate, JobRecord, JobState, decide, replacements
from outlast.launch.agent.outcome import Death
from outlast.launch.workers.worker import Worker

__all__ = ["Ledger"]


class Ledger:
    """The deaths of a job, in the order in which they were judged."""

    def __init__(self, max_restarts: int | None) -> None:
        self._max_restarts = max_restarts
        self._used = 0
        self.deaths: list[Death] = []

    def judge(self, worker: Worker, exit_code: int, job: JobRecord) -> Fate:
        """What is to come of a death in a running job; takes the restart that it needs."""
        fate = decide(exit_code, worker.pid, job, self._used, self._max_restarts)
        if fate in (Fate.REPLACED, Fate.RESTARTED):
            self._used += 1
        return fate

    def record(self, worker: Worker, exit_code: int, when: float, fate: Fate) -> Death:
        """Keep a death, with what the worker said last."""
        words, source = worker.last_words()
        death = Death(
            rank=worker.place.local_rank,
            pid=worker.pid,
            exit_code=exit_code,
            when=when,
            fate=fate,
            words=words,
            source=source,
        )
        self.deaths.append(death)
        return death

    def lost(self, death: Death) -> None:
        """Correct a death that was to be replaced, and was not after all."""
        self.deaths[self.deaths.index(death)] = dataclasses.replace(death, fate=Fate.LOST)

    def budget(self, job: JobRecord) -> str:
        """How much is used, in words."""
        if job.state is JobState.PLAIN:
            return f"restart {self._used} of {self._max_restarts}"
        return f"replacement {self._used} of {replacements(self._max_restarts)}"

    def cause(self, job: JobRecord) -> Death | None:
        """The first failure from which the job did not recover."""
        return outcome.first_cause(self.deaths, job)
