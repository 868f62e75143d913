"""The workers of a job: who runs in which place, and who ran there before."""

from __future__ import annotations

import collections
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from outlast.events import Emitter, WorkerExited, WorkerStarted
from outlast.launch.config.job_spec import Job
from outlast.launch.event_loop import Loop
from outlast.launch.output.console import Console
from outlast.launch.workers.worker import Place, Worker, start_worker

__all__ = ["Crew"]


class Crew:
    """Starts workers in their places, and keeps account of them.

    Args:
        job: what was asked for.
        folder: for logs and error files.
        loop: watches their output.
        console: shows it.
        emitter: told of every start and end.
    """

    def __init__(
        self, job: Job, folder: Path, loop: Loop, console: Console, emitter: Emitter
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

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._running.values()))

    def __len__(self) -> int:
        return len(self._running)

    def get(self, pid: int) -> Worker | None:
        """The running worker of this pid, if there is one."""
        return self._running.get(pid)

    def start_all(self, port: int) -> None:
        """Start a worker in every place."""
        for rank in range(self._job.nproc):
            self._start(rank, port)

    def next_attempt(self) -> None:
        """Count the restart of all; nobody is running."""
        self.attempt += 1
        self._replacements.clear()

    def replace(self, rank: int, port: int) -> Worker:
        """Start a new process in the place of one that has died."""
        self._replacements[rank] += 1
        return self._start(rank, port)

    def delay_s(self, rank: int) -> float:
        """How long the place of a worker that just died stays empty."""
        return self._job.backoff.delay_s(self._lifetimes_s[rank])

    def remove(self, worker: Worker, exit_code: int) -> None:
        """Take a worker that was reaped off the list, after its last output."""
        del self._running[worker.pid]
        worker.ended(exit_code)
        self._ended.append(worker)
        self._lifetimes_s[worker.place.local_rank].append(self._loop.clock.now() - worker.started)
        self._emitter.emit(
            WorkerExited(
                rank=worker.place.local_rank,
                worker_pid=worker.pid,
                exit_code=exit_code,
                last_words=worker.last_words()[0] if exit_code else "",
            )
        )

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every worker: to the process, which may want to end in order, and not
        to the helpers in its group, without which it could not.
        """
        for worker in self:
            # Not reaped yet, so the number is still its own. And not by `Popen.send_signal`: that
            # reaps a process that has just ended, and its end would never be seen.
            os.kill(worker.pid, number)

    def close(self) -> None:
        """Give back the pipes and files of all workers, after what is left in them."""
        for worker in (*self._ended, *self):
            worker.close()
        self._ended.clear()

    def _start(self, rank: int, port: int) -> Worker:
        worker = start_worker(
            self._job,
            Place(rank, self.attempt, self._replacements[rank], self._starts[rank]),
            folder=self._folder,
            port=port,
            loop=self._loop,
            console=self._console,
        )
        self._starts[rank] += 1
        self._running[worker.pid] = worker
        self._emitter.emit(
            WorkerStarted(rank=rank, worker_pid=worker.pid, attempt=worker.place.start)
        )
        return worker
