"""Workers that are stopped, by SIGSTOP for one, and call no wrapped function.

Within a wrapped call, the monitor process of a rank sees that the rank is stopped, and ends it. Of
any other worker, the kernel tells its parent, the launcher, with SIGCHLD: one that does not go on
within the hard timeout of a `Wrapper` is killed, and then replaced or restarted as any that ended.
"""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path

from outlast.coordination.job_record import JobState
from outlast.launch.agent.resources import JobResources
from outlast.launch.workers.worker_group import Worker

_LIMIT_S = 90.0
"""The default `hard_timeout` of a `Wrapper`."""


class StoppedWorkers:
    """Call `look` after each SIGCHLD."""

    def __init__(self, resources: JobResources) -> None:
        self._resources = resources
        self._stops: dict[int, int] = {}  # how often each worker has been stopped, by its pid

    def look(self) -> None:
        # One at a time, as the ends of children; each is told once.
        kinds = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        while (found := _changed(kinds)) is not None:
            worker = self._resources.workers.get(found.si_pid)
            if worker is not None and found.si_code == os.CLD_STOPPED:
                self._on_stop(worker, found.si_status)

    def _on_stop(self, worker: Worker, number: int) -> None:
        if self._resources.coordinator.keys.job().state is JobState.RUNNING:
            return
        self._stops[worker.pid] = count = self._stops.get(worker.pid, 0) + 1
        self._resources.console.say(
            f"rank {worker.rank} (pid {worker.pid}) was stopped by {signal.Signals(number).name}: "
            f"it is killed unless it goes on within {_LIMIT_S:g} s"
        )
        self._resources.loop.call_later(_LIMIT_S, functools.partial(self._end, worker, count))

    def _end(self, worker: Worker, count: int) -> None:
        if self._resources.workers.get(worker.pid) is not worker:
            return
        if self._stops[worker.pid] == count and _is_stopped(worker.pid):
            worker.killer = f"the launcher, after it was stopped for {_LIMIT_S:g} s"
            os.kill(worker.pid, signal.SIGKILL)


def _changed(kinds: int) -> os.waitid_result | None:
    try:
        return os.waitid(os.P_ALL, 0, kinds)
    except ChildProcessError:
        return None


def _is_stopped(pid: int) -> bool:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2]
    return fields[:1] == b"T"
