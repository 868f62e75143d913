"""What a job has around it: store, loop, console, folder, warden; opened and given back as one."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from outlast.clock import Clock
from outlast.errors import LaunchError
from outlast.events import Emitter, JsonlSink, NullSink, Sink
from outlast.events.run_folders import new_run
from outlast.launch import environment
from outlast.launch.agent.job_store import AgentStore
from outlast.launch.config.job_spec import Job
from outlast.launch.event_loop import Loop
from outlast.launch.output.console import Console
from outlast.launch.processes.reaping import reap, start_warden
from outlast.launch.workers.worker_group import Crew
from outlast.system.processes import become_subreaper

__all__ = ["FORWARDED", "Site"]

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals that are passed on to the workers; torchrun's."""


class Site:
    """Opens everything before the first worker is started, and closes it after the last one.

    Args:
        job: what is to be run.
        on_signal: called from the loop for SIGCHLD and each of `FORWARDED`.
        clock: measures all times of the launcher.
    """

    loop: Loop
    store: AgentStore
    console: Console
    crew: Crew

    def __init__(
        self, job: Job, on_signal: Callable[[signal.Signals], None], clock: Clock | None
    ) -> None:
        self.job = job
        self.host = socket.gethostname()
        self.loop = Loop((signal.SIGCHLD, *FORWARDED), on_signal, clock=clock)
        self._stack = ExitStack()
        self._scratch: Path | None = None
        self._warden: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Site:
        with ExitStack() as stack:
            try:
                self._open(stack)
            except OSError as e:
                raise LaunchError(f"the job cannot be started: {e}") from e
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def keep(self) -> list[int]:
        """The children that are the launcher's own, not the job's."""
        return [] if self._warden is None else [self._warden.pid]

    def other_child_ended(self, pid: int, exit_code: int) -> None:
        """Note the end of a child that is no worker: a helper of one, or the warden."""
        if self._warden is None or pid != self._warden.pid:
            return
        self._warden.returncode = exit_code
        self._warden = None
        # Killed by mistake, it is started anew; one that failed by itself would fail again.
        if exit_code < 0:
            self._start_warden()

    def _open(self, stack: ExitStack) -> None:
        job = self.job
        self.store = AgentStore(job.master_addr, job.master_port)
        stack.callback(self.store.close)
        sink: Sink = NullSink()
        if job.events_dir is not None:
            # A folder of its own: the logs of two runs would be read as those of one.
            events_dir = new_run(job.events_dir, job.run_id)
            sink = JsonlSink(events_dir / f"agent-{os.getpid()}.jsonl")
            job = dataclasses.replace(job, events_dir=events_dir)
        stack.callback(sink.close)
        folder = self._folder(stack)
        if job.chaos is not None and not environment.names_chaos_state():
            job = dataclasses.replace(job, chaos_state=self._chaos_state(stack))
        stack.enter_context(self.loop)
        self.console = Console(self.loop)
        stack.callback(self.console.close)
        become_subreaper()
        stack.callback(become_subreaper, False)
        self._start_warden()
        stack.callback(self._stop_warden)
        emitter = Emitter(sink, clock=self.loop.clock, host=self.host)
        self.crew = Crew(job, folder, self.loop, self.console, emitter)
        stack.callback(self.crew.close)
        if job.log_dir is None and job.routes.any_file:
            self.console.say(f"the output in files is in {folder}")

    def _folder(self, stack: ExitStack) -> Path:
        """For output and error files; removed at the end if nobody asked for any."""
        job = self.job
        if job.log_dir is not None:
            folder = job.log_dir / job.run_id
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        folder = Path(tempfile.mkdtemp(prefix="outlast-"))
        if job.routes.any_file:
            return folder
        self._scratch = folder
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _chaos_state(self, stack: ExitStack) -> Path:
        """For the faults that have fired, which replacements and restarts must know."""
        state = Path(tempfile.mkdtemp(prefix="outlast-chaos-", dir=self._scratch))
        stack.callback(shutil.rmtree, state, ignore_errors=True)
        return state

    def _start_warden(self) -> None:
        self._warden = start_warden(
            environment.mark(self.job), self._scratch, environment.warden_environment()
        )

    def _stop_warden(self) -> None:
        if self._warden is not None:
            self._warden.kill()
            reap(self._warden.pid)
            self._warden.returncode = -signal.SIGKILL
