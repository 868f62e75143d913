"""Checks this host before it takes part in a job: in a child process, with a limit for each check.

The launcher checks before it asks for a place: an unhealthy host is to the others as one that never
came, and a spare was checked before it became one. Nothing is checked when a spare takes a place:
the others would wait for it. The network is checked once it has joined (`hosts.job.neighbors`).
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable

from outlast.errors import HostUnfit
from outlast.launch.config.health_spec import HealthSpec
from outlast.launch.health.check_process import CheckProcess
from outlast.system.units import duration_text


def check_host(spec: HealthSpec | None, say: Callable[[str], None]) -> None:
    """Check this host; `None` checks nothing. `say` prints a line.

    Raises:
        HostUnfit: naming the host, the check that failed, the figures, and what to do.
    """
    if spec is None:
        return
    host, began = socket.gethostname(), time.monotonic()
    checks = CheckProcess(dataclasses.asdict(spec), spec.limit_s)
    try:
        failure = checks.failure()
    finally:
        left = checks.end()
    if failure:
        raise HostUnfit(
            f"host {host} is not healthy, and runs no ranks: {failure}{left}. Repair the host, or "
            "leave the check out (--health-check, --health-command)"
        )
    took = duration_text(time.monotonic() - began)
    say(f"host {host} is healthy, checked in {took}: {'; '.join(checks.figures)}")
