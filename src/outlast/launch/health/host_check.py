"""Checks this host before it takes part in a job: in a child process, with a limit for each check.

The launcher checks before it asks for a place: an unhealthy host is to the others as one that never
came, and a spare was checked before it became one. Nothing is checked when a spare takes a place:
the others would wait for it. The network is checked once it has joined (`hosts.job.neighbors`).
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outlast.errors import HostUnfit
from outlast.launch import environment
from outlast.launch.config.health_spec import HealthSpec
from outlast.system.error_text import exit_text
from outlast.system.units import duration_text
from outlast.system.waiting import readable

_KILL_S = 5.0
"""How long a killed process may take to end: one that waits for a broken disk may never do so."""


class CheckProcess:
    """Runs `checks`, in a process group of its own. `variables`: for its environment, besides this
    process's own.
    """

    def __init__(
        self,
        specification: Mapping[str, Any],
        limit_s: float,
        *,
        first: str = "the first check",
        variables: Mapping[str, str] | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        self.figures: list[str] = []
        self._limit_s, self._first, self._began = limit_s, first, time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outlast.launch.health.checks", json.dumps(specification)],
            env={**environment.checks_environment(), **(variables or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=fds,
        )

    def failure(self) -> str:
        """Which check has failed, and how; empty if all have passed."""
        stdout = self._process.stdout
        assert stdout is not None
        name, begun, data = self._first, self._began, b""
        while True:
            left_s = begun + self._limit_s - time.monotonic()
            if not readable(stdout.fileno(), timeout=left_s):
                return f"{name} has not ended within {self._limit_s:g} s (--health-timeout)"
            data += (more := os.read(stdout.fileno(), 1 << 16))
            if not more:
                code = self._process.wait()  # 0 also if the agent has reaped it
                return f"{name}: its process {exit_text(code) if code else 'has ended'}"
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

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kill the process and its helpers; `failure` then returns."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> str:
        """Kill what is left of the process and its helpers; in words if that does not help."""
        self.kill()
        left = ""
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            left = f" (its process {self._process.pid} cannot be killed)"
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        return left


def check_host(spec: HealthSpec | None, say: Callable[[str], None]) -> None:
    """Check this host; `None` checks nothing. `say` prints a line. A `HostUnfit` naming the host,
    the check that failed, the figures, and what to do.
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
