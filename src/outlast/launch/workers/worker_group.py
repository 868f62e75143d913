"""The workers of a job: starts, replaces, signals and removes them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import psutil

from outlast.errors import LaunchError
from outlast.events.emitter import Emitter
from outlast.events.types import WorkerExited, WorkerStarted
from outlast.launch import environment
from outlast.launch.config.job_spec import JobSpec, Placement, Std
from outlast.launch.event_loop import EventLoop
from outlast.launch.workers import exec_shim
from outlast.launch.workers.output import KEPT_LINES, Capture, Console, readable
from outlast.launch.workers.standby import StandbyPool
from outlast.system.departure import Departure

_TAIL_BYTES = 16 * 1024
LONGEST_BACKOFF_S = 60.0
SOON_S = 10.0
"""A process with a shorter lifetime than this died soon after its start."""


@dataclasses.dataclass
class Worker:
    """A worker process with its pipes and files."""

    rank: int  # in the whole job
    local_rank: int
    start: int  # number of earlier processes of this local rank, in all attempts
    process: subprocess.Popen[bytes]
    was_standby: bool
    started: float
    folder: Path
    captures: list[Capture]
    stderr: Capture | None
    stderr_file: tuple[Path, int] | None
    shown: bool  # whether the console shows its stderr
    departure: Departure | None = None  # what it has told of that
    at_end: bool = False  # its script is at its end
    settled: bool = False  # its rank is treated as if this process had ended
    ended_by_launcher: bool = False  # because it did not end by itself
    stuck: bool = False  # SIGKILL does not end it
    killer: str = ""  # who kills it, and why, if the launcher does
    leaves: str | None = None  # why its rank is to move to another process, its `successor`
    successor: Worker | None = None
    # what had inherited its devices, and was killed
    holders: list[psutil.Process] = dataclasses.field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    def ended(self, exit_code: int) -> None:
        """Note that the process was reaped, and read its last output."""
        self.process.returncode = exit_code  # otherwise subprocess would wait for it again
        for capture in self.captures:
            capture.drain()

    def error_time(self) -> float | None:
        try:
            return _error_file(self.folder).stat().st_mtime
        except OSError:
            return None

    def last_output(self) -> tuple[str, str]:
        """Its traceback or last lines on stderr, and the source: `traceback`, `stderr` or empty."""
        traceback = _traceback(_error_file(self.folder))
        if traceback:
            return traceback, "traceback"
        lines: list[str] = []
        if self.stderr is not None:
            lines = list(self.stderr.last)
        elif self.stderr_file is not None:
            lines = _tail(*self.stderr_file)
        return "\n".join(lines), "stderr" if lines else ""

    def close(self) -> None:
        for capture in self.captures:
            capture.close()


def backoff_s(first_s: float, lifetimes_s: Sequence[float]) -> float:
    """The wait before the next process of a rank, given the lifetimes of the earlier ones. It
    doubles with each death soon after a start.

    A long-lived process ends the series: its death says nothing about the next process. The first
    replacement of a series is immediate, so that a single fault costs no wait; the next one waits
    for `first_s`.
    """
    short_lived = itertools.takewhile(lambda s: s < SOON_S, reversed(lifetimes_s))
    deaths = sum(1 for _ in short_lived)
    if deaths < 2:
        return 0.0
    # The exponent is bounded because a float overflows at 2**1024.
    return float(min(first_s * 2.0 ** min(deaths - 2, 64), LONGEST_BACKOFF_S))


class WorkerGroup:
    """The running workers of this host, and the earlier processes of each local rank.

    `standbys` take the places of dead workers. `last_exit_codes` has, by local rank, the exit code
    of the latest process that has ended.

    Logs and error files go to `folder`; `emitter` gets an event for every start and end.
    """

    def __init__(
        self, job: JobSpec, folder: Path, loop: EventLoop, console: Console, emitter: Emitter
    ) -> None:
        self._job, self._folder, self._loop, self._console = job, folder, loop, console
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

    @property
    def takes_from(self) -> str | None:
        """The ID of the host whose ranks these workers succeed, or have succeeded."""
        given = self._placement.variables.get("OUTLAST_SUCCEEDS")
        return given and given.partition(" ")[0]

    def get(self, pid: int) -> Worker | None:
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
        self._replacements[local_rank] += 1
        return self._start(local_rank)

    def delay_s(self, local_rank: int) -> float:
        return backoff_s(self._job.backoff_s, self._lifetimes_s[local_rank])

    def remove(self, worker: Worker, exit_code: int) -> None:
        del self._running[worker.pid]
        worker.ended(exit_code)
        self._ended.append(worker)
        if not worker.settled:
            self.settle(worker, exit_code)

    def settle(self, worker: Worker, exit_code: int) -> None:
        """Note the end of a worker, or that its rank has left: its process may go on."""
        worker.settled = True
        self.last_exit_codes[worker.local_rank] = exit_code
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
        for worker in (*self._ended, *self):
            worker.close()
        self._ended.clear()

    def _start(self, local_rank: int) -> Worker:
        worker = self._open(local_rank)
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

    def _open(self, local_rank: int) -> Worker:
        """Start a worker in a new session, or make a ready standby process the worker; its files go
        to `attempt_N/LOCAL_RANK/`.
        """
        placement, routes, start = self._placement, self._job.routes, self._starts[local_rank]
        rank = placement.ranks(self._job.nproc)[local_rank]
        folder = self._folder / f"attempt_{start}" / str(local_rank)
        captures: dict[Std, Capture] = {}
        stderr_file = None
        with contextlib.ExitStack() as close_here, contextlib.ExitStack() as on_failure:
            ends: dict[Std, int] = {}
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _error_file(folder).unlink(missing_ok=True)  # of an earlier run with the same id
                for stream, name in ((Std.OUT, "stdout.log"), (Std.ERR, "stderr.log")):
                    file: BinaryIO | None = None
                    if routes.to_file(local_rank, stream):
                        file = (folder / name).open("ab", buffering=0)
                        on_failure.callback(file.close)
                        if not routes.to_console(local_rank, stream):
                            # Directly into the file: the worker never waits for the launcher.
                            ends[stream] = close_here.enter_context(file).fileno()
                            if stream is Std.ERR:
                                stderr_file = (folder / name, file.tell())
                            continue
                    read, write = os.pipe()
                    close_here.callback(os.close, write)
                    ends[stream] = write
                    console = self._console
                    outlet = console.stdout if stream is Std.OUT else console.stderr
                    captures[stream] = Capture(
                        self._loop,
                        read,
                        console.prefix(rank, int(stream)),
                        outlet if local_rank in routes.shown else None,
                        file,
                    )
                    on_failure.callback(captures[stream].close)
                variables = environment.worker_environment(
                    self._job,
                    placement,
                    local_rank=local_rank,
                    replacement=placement.taken_over + self._replacements[local_rank],
                    error_file=_error_file(folder),
                )
                for worker in self:
                    if worker.local_rank == local_rank and worker.leaves is not None:
                        host = placement.variables.get("OUTLAST_HOST", "")
                        variables["OUTLAST_SUCCEEDS"] = f"{host} {worker.leaves}"
                standby = self.standbys.take(variables, [ends[Std.OUT], ends[Std.ERR]])
                process = self._spawn(variables, ends) if standby is None else standby.process
            except OSError as e:
                raise LaunchError(f"cannot start the worker of rank {rank}: {e}") from e
            on_failure.pop_all()
        return Worker(
            rank=rank,
            local_rank=local_rank,
            start=start,
            process=process,
            was_standby=standby is not None,
            started=self._loop.clock.now(),
            folder=folder,
            captures=list(captures.values()),
            stderr=captures.get(Std.ERR),
            stderr_file=stderr_file,
            shown=routes.to_console(local_rank, Std.ERR),
        )

    def _spawn(self, variables: dict[str, str], ends: dict[Std, int]) -> subprocess.Popen[bytes]:
        command = self._job.program.command(environment.python(), self._job.chaos is not None)
        return subprocess.Popen(
            [*exec_shim.command(), *command],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=ends[Std.OUT],
            stderr=ends[Std.ERR],
            start_new_session=True,
        )


def _error_file(folder: Path) -> Path:
    return folder / "error.json"


def _traceback(path: Path) -> str:
    """The traceback (or else the message) in the error file of torch's `@record`."""
    try:
        message = json.loads(path.read_text(errors="replace"))["message"]
        if isinstance(message, dict):
            extra = message.get("extraInfo") or {}
            message = extra.get("py_callstack") or message.get("message") or ""
        return str(message).rstrip()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""  # there is none, or the process died while writing it


def _tail(path: Path, start: int) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _TAIL_BYTES))
            return [readable(line) for line in file.read().splitlines()[-KEPT_LINES:]]
    except OSError:
        return []
