"""`--health-interval`: the health command again and again, while the job runs."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable

from outlast.launch.agent.resources import JobResources
from outlast.launch.config.job_spec import HealthSpec
from outlast.launch.health.host_check import CheckProcess


class HealthWatch:
    """Calls `failed` with the reason each time the command fails. Its other checks are left out:
    ranks have the devices, and a full disk of the job would be the fault of each host.
    """

    def __init__(
        self, resources: JobResources, spec: HealthSpec, failed: Callable[[str], None]
    ) -> None:
        self._resources, self._failed = resources, failed
        self._spec = dataclasses.replace(spec, level="off")
        self._lock, self._over = threading.Lock(), threading.Event()
        self._check: CheckProcess | None = None
        # A daemon: a process that cannot be killed must not keep this one alive.
        threading.Thread(target=self._run, name="health", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._over.set()
            if self._check is not None:
                self._check.kill()

    def _run(self) -> None:
        while not self._over.wait(self._spec.interval_s):
            with self._lock:
                if self._over.is_set():
                    return
                self._check = check = CheckProcess(
                    dataclasses.asdict(self._spec), self._spec.limit_s
                )
                self._resources.checks.append(check.pid)
            failure = check.failure()
            with self._lock:
                self._check = None
                left = check.end()
            self._resources.checks.remove(check.pid)
            if failure and not self._over.is_set():
                reason = f"it is not healthy: {failure}{left}"
                self._resources.loop.call_from_thread(functools.partial(self._failed, reason))
