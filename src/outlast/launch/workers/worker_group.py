"""The workers of a job: starts, replaces, signals and removes them."""

from __future__ import annotations

import collections
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from outlast.events import Emitter, WorkerExited, WorkerStarted
from outlast.launch.config.job_spec import JobSpec
from outlast.launch.event_loop import EventLoop
from outlast.launch.output.console import Console
from outlast.launch.workers.worker import Worker, WorkerSlot, start_worker


class WorkerGroup:
    """The running workers, and the earlier processes of each rank.

    `last_exit_codes` has, by rank, the exit code of the latest process that has ended.

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
        self.attempt = 0
        self.last_exit_codes: dict[int, int] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._running.values()))

    def __len__(self) -> int:
        return len(self._running)

    def get(self, pid: int) -> Worker | None:
        """The running worker with this pid, if there is one."""
        return self._running.get(pid)

    def start_all(self, port: int) -> None:
        """Start a worker for every rank, and print their process IDs."""
        pids = [self._start(rank, port).pid for rank in range(self._job.nproc)]
        named = ", ".join(f"rank {rank} is pid {pid}" for rank, pid in enumerate(pids))
        self._console.say(f"started {len(pids)} rank{'' if len(pids) == 1 else 's'}: {named}")

    def next_attempt(self) -> None:
        """Count a restart of all workers; no worker may be running."""
        self.attempt += 1
        self._replacements.clear()

    def replace(self, rank: int, port: int) -> Worker:
        """Start a new process for the rank of a dead one."""
        self._replacements[rank] += 1
        return self._start(rank, port)

    def delay_s(self, rank: int) -> float:
        """How long to wait before a rank that just died is replaced."""
        return self._job.backoff.delay_s(self._lifetimes_s[rank])

    def remove(self, worker: Worker, exit_code: int) -> None:
        """Remove a reaped worker, after reading its last output."""
        del self._running[worker.pid]
        worker.ended(exit_code)
        self.last_exit_codes[worker.slot.local_rank] = exit_code
        self._ended.append(worker)
        self._lifetimes_s[worker.slot.local_rank].append(self._loop.clock.now() - worker.started)
        self._emitter.emit(
            WorkerExited(
                rank=worker.slot.local_rank,
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

    def _start(self, rank: int, port: int) -> Worker:
        slot = WorkerSlot(rank, self.attempt, self._replacements[rank], self._starts[rank])
        folder, loop, console = self._folder, self._loop, self._console
        worker = start_worker(self._job, slot, folder=folder, port=port, loop=loop, console=console)
        self._starts[rank] += 1
        self._running[worker.pid] = worker
        event = WorkerStarted(rank=rank, worker_pid=worker.pid, attempt=worker.slot.start)
        self._emitter.emit(event)
        return worker
