"""The resources of a job (coordinator, event loop, console, folders, orphan killer), opened and
closed together.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.errors import ChaosError, LaunchError
from outlast.events.emitter import Emitter, JsonlSink, NullSink, Sink
from outlast.events.run_folders import new_run, run_name
from outlast.events.spool import BESIDE, Spool
from outlast.events.types import LauncherStarted
from outlast.launch import environment
from outlast.launch.agent import orphan_killer
from outlast.launch.agent.coordinator import Coordinator, OpenCoordinator
from outlast.launch.config.job_spec import JobSpec
from outlast.launch.event_loop import EventLoop
from outlast.launch.workers.descendants import reap, with_descendants
from outlast.launch.workers.output import Console, say_early
from outlast.launch.workers.worker_group import WorkerGroup
from outlast.system.departure import Departures
from outlast.system.processes import become_subreaper

if TYPE_CHECKING:
    from outlast.launch.agent.agent import Agent
    from outlast.launch.agent.metrics_process import MetricsProcess

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals that are forwarded to the workers; the same as torchrun's."""


class JobResources:
    """Opens everything before the first worker is started, and closes it after the last one.

    The event loop calls `on_signal` for SIGCHLD and each of `FORWARDED`.
    """

    coordinator: Coordinator
    console: Console
    workers: WorkerGroup
    emitter: Emitter

    def __init__(
        self,
        job: JobSpec,
        open_coordinator: OpenCoordinator,
        agent: Agent,
        on_signal: Callable[[signal.Signals], None],
    ) -> None:
        self._open_coordinator = functools.partial(open_coordinator, self, agent)
        self.job = job
        self.host = socket.gethostname()
        self.loop = EventLoop((signal.SIGCHLD, *FORWARDED), on_signal)
        self._stack = ExitStack()
        self._temporary: Path | None = None
        self.checks: list[int] = []  # processes that check this host
        self._orphan_killer: subprocess.Popen[bytes] | None = None
        self._metrics: MetricsProcess | None = None
        self.spool: Spool | None = None  # of a job without `--events-dir`

    def __enter__(self) -> JobResources:
        with ExitStack() as stack:
            try:
                self._open(stack)
            except OSError as e:
                raise LaunchError(f"the job cannot be started: {e}") from e
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def own_children(self) -> list[int]:
        """The children that stay when the workers and their helpers are ended."""
        own = [] if self._orphan_killer is None else [self._orphan_killer.pid]
        metrics = [] if self._metrics is None else self._metrics.pids
        checks = with_descendants(self.checks)
        return [*own, *metrics, *checks, *self.workers.standbys.pids]

    def other_child_ended(self, pid: int, exit_code: int) -> None:
        """Note the end of a non-worker child: a worker's helper, a standby process, the orphan
        killer, or the process of the metrics.
        """
        if self.workers.standbys.ended(pid, exit_code):
            return
        if self._metrics is not None and self._metrics.ended(pid, exit_code):
            return
        if self._orphan_killer is None or pid != self._orphan_killer.pid:
            return
        self._orphan_killer.returncode = exit_code
        self._orphan_killer = None
        # Restarted only if it was killed; if it failed by itself, it would fail again.
        if exit_code < 0:
            self._start_orphan_killer()

    def _open(self, stack: ExitStack) -> None:
        job = self.job
        self.coordinator = self._open_coordinator()
        stack.callback(self.coordinator.close)
        if job.hosts is not None:
            mark = f"{job.hosts.job_mark(job.run_id)}-{job.mark}"
            job = dataclasses.replace(job, token=self.coordinator.agree("run", mark))
        folder = self._folder(stack)
        sink: Sink = NullSink()
        events_dir: Path | None = None
        exports = job.metrics_port is not None or job.opentelemetry
        if job.events_dir is not None:
            # A folder for this run: the logs of two runs in one folder would be read as one run.
            events_dir = self._events_folder(job.events_dir)
        elif exports or not environment.names_events():
            events_dir = self._temporary_folder("outlast-events-", stack)
            run = self.coordinator.agree("events-folder", run_name(job.run_id))
            hosts = 1 if job.hosts is None else job.hosts.maximum
            Spool.create(events_dir, run, ranks=job.nproc * hosts)
            self.spool = Spool.of(events_dir)
        if events_dir is not None:
            name = f"agent-{self.host}-" if self.coordinator.host_id else "agent-"
            sink = JsonlSink(events_dir / f"{name}{os.getpid()}.jsonl", locked=True)
            job = dataclasses.replace(job, events_dir=events_dir)
        stack.callback(sink.close)
        stack.callback(self._keep_events)
        if job.chaos is not None and environment.chaos_state() is None:
            # The folder that records fired faults, for replacements and restarts to read.
            state = self._temporary_folder("outlast-chaos-", stack)
            job = dataclasses.replace(job, chaos_state=state)
        stack.enter_context(self.loop)
        self.departures = Departures(job.mark)
        stack.callback(self.departures.socket.close)
        self.console = Console(self.loop)
        stack.callback(self.console.close)
        become_subreaper()
        stack.callback(become_subreaper, False)
        self._start_orphan_killer()
        stack.callback(self._stop_orphan_killer)
        self.emitter = Emitter(sink, clock=self.loop.clock, host=self.host)
        self.emitter.emit(LauncherStarted(run_id=job.run_id, command=job.program.as_typed()))
        if job.chaos is not None and job.events_dir is not None:
            fired = job.chaos_state or environment.chaos_state()
            stack.callback(self._record_planned_faults, job.chaos, fired)
        self.workers = WorkerGroup(job, folder, self.loop, self.console, self.emitter)
        stack.callback(self.workers.close)
        if exports and events_dir is not None:
            from outlast.launch.agent.metrics_process import MetricsProcess  # only if needed

            self._metrics = MetricsProcess(
                job,
                events_dir,
                job.run_id if self.job.events_dir is None else events_dir.name,
                self.host,
                self.console,
            )
            stack.callback(self._metrics.close)
        if job.log_dir is None and job.routes.any_file:
            self.console.say(f"output files are in {folder}")

    @property
    def kept_events(self) -> Path | None:
        """Where `outlast report` finds the events of a job without `--events-dir`."""
        target = None if self.spool is None else self.spool.target
        if target is not None and target.parent.name == BESIDE:
            return target.parent.parent
        return None if target is None else target.parent

    def _keep_events(self) -> None:
        """Keeps what processes have written that have ended before they knew where."""
        target = None if self.spool is None else self.spool.target
        if self.spool is not None and target is not None:
            try:
                self.spool.copy_all(target)
            except OSError as error:
                say_early(f"not all events are in {target}: {error}")

    def _events_folder(self, directory: Path) -> Path:
        """The folder of this run, which is the same on all hosts if they share a file system."""
        mine = new_run(directory, self.job.run_id)
        agreed = mine.with_name(self.coordinator.agree("events-folder", mine.name))
        if agreed != mine:
            mine.rmdir()
            agreed.mkdir(exist_ok=True)
        return agreed

    def _folder(self, stack: ExitStack) -> Path:
        """The folder of output and error files; a temporary one if it has only error files."""
        job = self.job
        page = self.coordinator.lease_page
        # That of the lease page is the coordinator's, which removes it.
        self._temporary = None if page is None else page.parent
        if job.log_dir is not None:
            folder = job.log_dir / job.run_id
            if self.coordinator.host_id:  # the hosts may share the folder
                folder /= self.host
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        if self._temporary is not None and not job.routes.any_file:
            return self._temporary
        folder = Path(tempfile.mkdtemp(prefix="outlast-"))
        if job.routes.any_file:
            return folder
        self._temporary = folder
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _temporary_folder(self, prefix: str, stack: ExitStack) -> Path:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=self._temporary))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _record_planned_faults(self, plan: Path, state: Path | None) -> None:
        # Imported by name, as in the workers: the launcher does not depend on fault injection.
        planned = importlib.import_module("outlast.chaos.fired_faults")
        try:
            for event in planned.planned_events(plan, state):
                self.emitter.emit(event)
        except (OSError, ChaosError) as error:
            self.console.say(f"the faults of {plan} are not in the events: {error}")

    def _start_orphan_killer(self) -> None:
        page = self.coordinator.lease_page
        lease_page = [] if page is None else [str(page)]
        program = [sys.executable, "-I", "-S", orphan_killer.__file__, str(os.getpid())]
        self._orphan_killer = subprocess.Popen(
            [*program, environment.mark(self.job), str(self._temporary or ""), *lease_page],
            env=environment.orphan_killer_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _stop_orphan_killer(self) -> None:
        if self._orphan_killer is not None:
            self._orphan_killer.kill()
            reap(self._orphan_killer.pid)
            self._orphan_killer.returncode = -signal.SIGKILL
