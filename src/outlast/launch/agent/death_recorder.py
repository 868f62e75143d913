"""Records the death of a worker for all who ask for it: who it was, and who killed it."""

from __future__ import annotations

import signal

from outlast.launch.agent.death_log import Death
from outlast.launch.agent.decisions import Decision, JobRecord
from outlast.launch.agent.replacement import CallWatch
from outlast.launch.agent.resources import JobResources
from outlast.launch.workers.descendants import OomKills
from outlast.launch.workers.worker_group import Worker


class DeathRecorder:
    """Adds each death to `deaths`, those of the job, and to the events, and tells other hosts. The
    record of the job is one of the worker that has died.
    """

    def __init__(self, resources: JobResources, deaths: list[Death], call_watch: CallWatch) -> None:
        self._resources, self._deaths, self._call_watch = resources, deaths, call_watch
        self._oom_kills = OomKills()

    def record(
        self, worker: Worker, code: int, when: float, decision: Decision, job: JobRecord
    ) -> Death:
        coordinator = self._resources.coordinator
        last_output, source = worker.last_output()
        death = Death(
            rank=worker.rank,
            local_rank=worker.local_rank,
            pid=worker.pid,
            exit_code=code,
            when=when,
            decision=decision,
            last_output=last_output,
            source=source,
            shown=worker.shown,
            killer=self._killer(worker, code, job),
            early=self._call_watch.is_early(worker, job),
            host_id=coordinator.host_id,
        )
        self._deaths.append(death)
        self._resources.emitter.emit(death.event())
        coordinator.failed(death)
        return death

    def _killer(self, worker: Worker, code: int, job: JobRecord) -> str:
        if code not in (-signal.SIGKILL, -signal.SIGTERM):
            return ""
        if worker.killer:
            return worker.killer
        if job.killed:
            return f"its monitor process, after {job.killed}"
        if code == -signal.SIGKILL and self._oom_kills.any_new():
            return "the kernel's out-of-memory killer"
        return "outside"
