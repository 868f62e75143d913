"""The process that exports the metrics of this host, and its restart if it is killed.

It reads the event logs, and nobody waits for it: whatever happens to it, the job goes on.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import msgspec

from outlast.errors import LaunchError
from outlast.launch.config.job_spec import JobSpec
from outlast.launch.workers.output import Console
from outlast.metrics.main import Order, listen, url
from outlast.system.background_process import BackgroundProcess, start_process

_MODULE = "outlast.metrics.main"
_LAST_EXPORT_S = 5.0
_RESTARTS = 3


class MetricsProcess:
    """Exports the metrics of a run, whose logs are in `folder`, until `close`; `host` is this
    host's name in its events. A `LaunchError` says that the port cannot be used: the user would
    look for metrics in vain.
    """

    def __init__(self, job: JobSpec, folder: Path, run: str, host: str, console: Console) -> None:
        self._order = Order(folder=str(folder), run=run, host=host, opentelemetry=job.opentelemetry)
        self._console = console
        self._restarts = 0
        self._process: BackgroundProcess | None = None
        self._listening: socket.socket | None = None
        if job.metrics_port is not None:
            try:
                self._listening = listen(job.metrics_host, job.metrics_port)
            except OSError as e:
                raise LaunchError(
                    f"--metrics-port {job.metrics_port}: cannot serve metrics at "
                    f"{job.metrics_host}: {e.strerror or e}"
                ) from e
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        if self._listening is not None:
            console.say(f"metrics: {url(self._listening)}")

    @property
    def pids(self) -> list[int]:
        return [] if self._process is None else [self._process.pid]

    def ended(self, pid: int, exit_code: int) -> bool:
        """Note the end of a child; returns whether it was this process. Restart it if it was
        killed; if it failed by itself, it would fail again.
        """
        if self._process is None or pid != self._process.pid:
            return False
        self._process.close()
        self._process = None
        if exit_code < 0 and self._restarts < _RESTARTS:
            self._restarts += 1
            try:
                self._start()
            except OSError as e:
                self._console.say(f"metrics end: their process cannot be restarted: {e}")
        else:
            self._console.say(f"metrics end: their process has ended with exit code {exit_code}")
        return True

    def close(self) -> None:
        """End it. With OpenTelemetry, it has a few seconds to send what is left."""
        if self._process is not None:
            self._process.close(_LAST_EXPORT_S if self._order.opentelemetry else 0.0)
            self._process = None
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def _start(self) -> None:
        self._process = start_process(_MODULE)
        listening = self._listening
        # A short message: it fits into the socket's buffer, and nothing waits for the process.
        with contextlib.suppress(OSError):  # it has ended already, which `ended` handles
            self._process.channel.send(
                msgspec.json.encode(self._order), [] if listening is None else [listening.fileno()]
            )
