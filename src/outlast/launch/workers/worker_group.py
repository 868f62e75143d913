"""The workers of a job: starts, replaces, signals and removes them."""

from __future__ import annotations

import collections
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from outlast.events import Emitter, WorkerExited, WorkerStarted
from outlast.launch.config.job_spec import JobSpec, Placement
from outlast.launch.event_loop import EventLoop
from outlast.launch.workers.console import Console
from outlast.launch.workers.standby import StandbyPool
from outlast.launch.workers.worker import Worker, start_worker


class WorkerGroup:
    """The running workers of this host, and the earlier processes of each local rank.

    `standbys` take the places of dead workers. `last_exit_codes` has, by local rank, the exit code
    of the latest process that has ended.

    Logs and error files go to `folder`; `emitter` gets an event for every start and end.
    """

    def __init__(
        self, job: JobSpec, folder: Path, loop: EventLoop, console: Console, emitter: Emitter
    ) -> None:
        self._job = job
        self._folder = folder
        self._loop = loop
        self._console = console
        self._emitter = emitter
        self._running: dict[int, Worker] = {}
        self._ended: list[Worker] = []
        self._starts: collections.Counter[int] = collections.Counter()
        self._replacements: collections.Counter[int] = collections.Counter()
        self._lifetimes_s: dict[int, list[float]] = collections.defaultdict(list)
        self._placement: Placement
        self.standbys = StandbyPool(job, loop, console, size=job.standby)
        self.last_exit_codes: dict[int, int] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._running.values()))

    def __len__(self) -> int:
        return len(self._running)

    def get(self, pid: int) -> Worker | None:
        """The running worker with this pid, if there is one."""
        return self._running.get(pid)

    def start_all(self, placement: Placement) -> None:
        """Start a worker for every local rank, and print their process IDs; none may be running."""
        self._placement = placement
        self._replacements.clear()
        workers = [self._start(local_rank) for local_rank in range(self._job.nproc)]
        named = ", ".join(f"rank {worker.rank} is pid {worker.pid}" for worker in workers)
        count = len(workers)
        spare = f"; standby processes: {self.standbys.size}" if self.standbys.size else ""
        self._console.say(f"started {count} rank{'' if count == 1 else 's'}: {named}{spare}")

    def replace(self, local_rank: int) -> Worker:
        """Start a new process in place of a dead one."""
        self._replacements[local_rank] += 1
        return self._start(local_rank)

    def delay_s(self, local_rank: int) -> float:
        """How long to wait before a worker that just died is replaced."""
        return self._job.backoff.delay_s(self._lifetimes_s[local_rank])

    def remove(self, worker: Worker, exit_code: int) -> None:
        """Remove a reaped worker, after reading its last output."""
        del self._running[worker.pid]
        worker.ended(exit_code)
        self.last_exit_codes[worker.local_rank] = exit_code
        self._ended.append(worker)
        self._lifetimes_s[worker.local_rank].append(self._loop.clock.now() - worker.started)
        self._emitter.emit(
            WorkerExited(
                rank=worker.rank,
                worker_pid=worker.pid,
                exit_code=exit_code,
                last_words=worker.last_output()[0] if exit_code else "",
            )
        )

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every worker: only to the process itself, which may need the helpers in
        its group to shut down cleanly.
        """
        for worker in self:
            # It is not reaped yet, so the pid is still its own. `Popen.send_signal` would reap a
            # process that has just ended, and its end would never be seen.
            os.kill(worker.pid, number)

    def close(self) -> None:
        """Read the rest of all workers' output, and close their pipes and files."""
        for worker in (*self._ended, *self):
            worker.close()
        self._ended.clear()

    def _start(self, local_rank: int) -> Worker:
        worker = start_worker(
            self._job,
            self._placement,
            local_rank=local_rank,
            replacement=self._placement.taken_over + self._replacements[local_rank],
            start=self._starts[local_rank],
            folder=self._folder,
            loop=self._loop,
            console=self._console,
            standbys=self.standbys,
        )
        self._starts[local_rank] += 1
        self._running[worker.pid] = worker
        self._emitter.emit(
            WorkerStarted(
                rank=worker.rank,
                worker_pid=worker.pid,
                attempt=worker.start,
                standby=worker.was_standby,
            )
        )
        return worker
