"""`--health-interval`: the health command again and again, while the job runs."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable

from outlast.launch.agent.resources import JobResources
from outlast.launch.config.job_spec import HealthSpec
from outlast.launch.health.host_check import CheckProcess
from outlast.launch.hosts.job.neighbors import CheckRun


class HealthWatch:
    """Calls `failed` with the reason each time the command fails. Its other checks are left out:
    ranks have the devices, and a full disk of the job would be the fault of each host.
    """

    def __init__(
        self, resources: JobResources, spec: HealthSpec, failed: Callable[[str], None]
    ) -> None:
        self._resources, self._failed = resources, failed
        self._spec = dataclasses.replace(spec, level="off")
        self._run, self._over = CheckRun(resources.checks), threading.Event()
        # A daemon: a process that cannot be killed must not keep this one alive.
        threading.Thread(target=self._repeat, name="health", daemon=True).start()

    def close(self) -> None:
        self._over.set()
        self._run.cancel()

    def _repeat(self) -> None:
        start = functools.partial(CheckProcess, dataclasses.asdict(self._spec), self._spec.limit_s)
        while not self._over.wait(self._spec.interval_s):
            if (check := self._run.start(start)) is None:
                return
            failure = check.failure()
            left = self._run.end()
            if failure and not self._over.is_set():
                reason = f"it is not healthy: {failure}{left}"
                self._resources.loop.call_from_thread(functools.partial(self._failed, reason))
