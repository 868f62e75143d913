"""Checks this host before it takes part in a job: in a child process, with a limit for each check.

The launcher checks before it asks for a place: an unhealthy host is to the others as one that never
came, and a spare was checked before it became one. Nothing is checked when a spare takes a place:
the others would wait for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from outlast.errors import HostUnfit
from outlast.launch import environment
from outlast.launch.config.health_spec import HealthSpec
from outlast.system.error_text import exit_text
from outlast.system.units import duration_text
from outlast.system.waiting import readable

_KILL_S = 5.0
"""How long a killed process may take to end: one that waits for a broken disk may never do so."""


def check_host(spec: HealthSpec | None, say: Callable[[str], None]) -> None:
    """Check this host; `None` checks nothing. `say` prints a line.

    Raises:
        HostUnfit: naming the host, the check that failed, the figures, and what to do.
    """
    if spec is None:
        return
    host, began = socket.gethostname(), time.monotonic()
    checks = _Checks(spec)
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


class _Checks:
    """The process that makes the checks, and what it has reported."""

    def __init__(self, spec: HealthSpec) -> None:
        self.figures: list[str] = []
        self._limit_s = spec.limit_s
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "outlast.launch.health.checks"),
                json.dumps(dataclasses.asdict(spec)),
            ],
            env=environment.checks_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def failure(self) -> str:
        """Which check has failed, and how; empty if all have passed."""
        stdout = self._process.stdout
        assert stdout is not None
        name, begun, data = "the first check", time.monotonic(), b""
        while True:
            left_s = begun + self._limit_s - time.monotonic()
            if not readable(stdout.fileno(), timeout=left_s):
                return f"{name} has not ended within {self._limit_s:g} s (--health-timeout)"
            data += (more := os.read(stdout.fileno(), 1 << 16))
            if not more:
                return f"{name}: its process {exit_text(self._process.wait())}"
            *lines, data = data.split(b"\n")
            for report in map(json.loads, lines):
                if "failed" in report:
                    return f"{name}: {report['failed']}"
                if "healthy" in report:
                    return ""
                if "figures" in report:
                    self.figures.append(report["figures"])
                else:
                    name = report["begins"]
                begun = time.monotonic()

    def end(self) -> str:
        """Kill what is left of the process and its helpers; in words if that does not help."""
        process = self._process
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        left = ""
        try:
            process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            left = f" (its process {process.pid} cannot be killed)"
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()
        return left
