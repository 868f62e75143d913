"""A job on one host: the launcher hosts the store, and decides alone."""

from __future__ import annotations

import signal

from outlast.launch.agent.coordinator import Actions, Outcome
from outlast.launch.agent.death_log import Death
from outlast.launch.agent.job_keys import JobKeys
from outlast.launch.agent.job_store import JobStore
from outlast.launch.agent.resources import JobResources
from outlast.launch.config.placement import Placement


class OneHost:
    """The coordinator of a job on one host."""

    host_id = ""
    lease_page = None

    def __init__(self, resources: JobResources, actions: Actions) -> None:
        job = resources.job
        self._store = JobStore(job.master_addr, job.master_port)
        self._actions = actions
        self._attempt = 0
        self.used = 0

    @property
    def keys(self) -> JobKeys:
        return JobKeys(self._store.client)

    def agree(self, name: str, value: str) -> str:
        return value

    def ready(self) -> None:
        if self._attempt:
            self._store.renew()
        store = (self._store.host, self._store.port)
        self._actions.start(Placement(store=store, attempt=self._attempt))
        self._attempt += 1

    def take_replacement(self, limit: int) -> bool:
        taken = self.used < limit
        self.used += taken
        return taken

    def give_up(self, ranks: frozenset[int]) -> None:
        self.keys.give_up(ranks)

    def restart(self, cause: str, pid: int) -> None:
        self.used += 1
        self._actions.restart("")

    def end(self, cause: str, pid: int) -> None:
        self._actions.end("")

    def stop(self, number: signal.Signals) -> None:
        self._actions.stop(number, "")

    def failed(self, death: Death) -> None:
        """No other host needs to know."""

    def finished(self, exit_codes: frozenset[int]) -> None:
        self._actions.finish(Outcome(job=self.keys.ended_job()))

    def close(self) -> None:
        self._store.close()
