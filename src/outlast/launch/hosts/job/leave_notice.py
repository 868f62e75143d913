"""What tells this host to leave: `--leave-when`, a file or a command, such as the notice of a
cloud that it takes the machine back, or a node's label; and the health command (`HealthWatch`).

The command of `--leave-when` is to wait for the notice, and to succeed when it has come. If it
fails, it is started again after a while. A file is looked for by such a command, too: on a file
system of the network, no event says that it is there.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import selectors
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress

from outlast.launch import environment
from outlast.launch.agent.resources import JobResources
from outlast.launch.config.job_spec import HealthSpec
from outlast.launch.event_loop import Timer
from outlast.launch.health.host_check import CheckProcess
from outlast.launch.hosts.job.neighbors import CheckRun
from outlast.launch.workers import exec_shim

_AGAIN_S = 5.0
_CAME = b"came\n"


class LeaveNotice:
    """Calls `told` with the reason, once. `source` is the argument of the option."""

    def __init__(self, resources: JobResources, source: str, told: Callable[[str], None]) -> None:
        self._resources, self._told = resources, told
        self._reason = f"--leave-when {source}"
        is_file = os.path.isabs(source) and not os.access(source.split()[0], os.X_OK)
        self._command = source
        if is_file:
            self._command = f"until [ -e {shlex.quote(source)} ]; do sleep 1; done"
        self._process: subprocess.Popen[bytes] | None = None
        self._timer = Timer()
        self._start()

    def close(self) -> None:
        self._timer.cancel()
        self._end()

    def _start(self) -> None:
        # The launcher reaps all children in one place: so not the exit code says that it is time.
        came = _CAME.decode().strip()
        script = f"({self._command}\n) >&2 && echo {came}"
        self._process = process = subprocess.Popen(
            [*exec_shim.command(), "/bin/sh", "-c", script],
            env=environment.checks_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._resources.checks.append(process.pid)
        assert process.stdout is not None
        self._resources.loop.watch(process.stdout.fileno(), selectors.EVENT_READ, self._read)

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        came = os.read(self._process.stdout.fileno(), len(_CAME)) == _CAME
        self._end()
        if came:
            self._told(self._reason)
        else:
            self._timer = self._resources.loop.call_later(_AGAIN_S, self._start)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or process.stdout is None:
            return
        self._resources.loop.unwatch(process.stdout.fileno())
        process.stdout.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.returncode = 0  # the launcher reaps it; subprocess would wait for it
        self._resources.checks.remove(process.pid)


class HealthWatch:
    """`--health-interval`: calls `failed` with the reason each time the health command fails. Other
    checks are left out: ranks have the devices, and a full disk would be the fault of each host.
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
