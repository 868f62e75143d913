"""One worker process: its start, its output, and its error file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

from outlast.errors import LaunchError
from outlast.launch import environment
from outlast.launch.config.job_spec import JobSpec, Placement, Std
from outlast.launch.event_loop import EventLoop
from outlast.launch.workers.console import Console
from outlast.launch.workers.output import KEPT_LINES, Capture, readable
from outlast.launch.workers.standby import StandbyPool

_TAIL_BYTES = 16 * 1024
_SHIM = str(Path(__file__).with_name("exec_shim.py"))


@dataclasses.dataclass
class Worker:
    """A worker process with its pipes and files.

    Attributes:
        rank: in the whole job.
        start: number of earlier processes of this local rank, in all attempts.
        shown: whether the console shows its stderr.
    """

    rank: int
    local_rank: int
    start: int
    process: subprocess.Popen[bytes]
    was_standby: bool
    started: float
    folder: Path
    captures: list[Capture]
    stderr: Capture | None
    stderr_file: tuple[Path, int] | None
    shown: bool

    @property
    def pid(self) -> int:
        """Its process id, also that of its session and process group."""
        return self.process.pid

    def ended(self, exit_code: int) -> None:
        """Note that the process was reaped, and read its last output."""
        self.process.returncode = exit_code  # otherwise subprocess would wait for it again
        for capture in self.captures:
            capture.drain()

    def error_time(self) -> float | None:
        """The modification time of its error file, if there is one."""
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
        """Close its pipes and files."""
        for capture in self.captures:
            capture.close()


def start_worker(
    job: JobSpec,
    placement: Placement,
    *,
    local_rank: int,
    replacement: int,
    start: int,
    folder: Path,
    loop: EventLoop,
    console: Console,
    standbys: StandbyPool,
) -> Worker:
    """Start a worker in a new session, or make a ready standby process the worker; its files go to
    `folder/attempt_N/LOCAL_RANK/`.

    Args:
        replacement: number of replacements of this rank in this attempt.
        start: number of earlier processes of this local rank, in all attempts.

    Raises:
        LaunchError: if the system cannot start another process.
    """
    rank = placement.ranks(job.nproc)[local_rank]
    own = folder / f"attempt_{start}" / str(local_rank)
    captures: dict[Std, Capture] = {}
    stderr_file = None
    with contextlib.ExitStack() as close_here, contextlib.ExitStack() as on_failure:
        ends: dict[Std, int | BinaryIO] = {}
        try:
            own.mkdir(parents=True, exist_ok=True)
            _error_file(own).unlink(missing_ok=True)  # of an earlier run with the same id
            for stream, name in ((Std.OUT, "stdout.log"), (Std.ERR, "stderr.log")):
                file: BinaryIO | None = None
                if job.routes.to_file(local_rank, stream):
                    file = (own / name).open("ab", buffering=0)
                    on_failure.callback(file.close)
                    if not job.routes.to_console(local_rank, stream):
                        # Directly into the file: the worker never waits for the launcher.
                        ends[stream] = close_here.enter_context(file)
                        if stream is Std.ERR:
                            stderr_file = (own / name, file.tell())
                        continue
                read, write = os.pipe()
                close_here.callback(os.close, write)
                ends[stream] = write
                shown = local_rank in job.routes.shown
                outlet = console.stdout if stream is Std.OUT else console.stderr
                prefix = console.prefix(rank, int(stream))
                captures[stream] = Capture(loop, read, prefix, outlet if shown else None, file)
                on_failure.callback(captures[stream].close)
            variables = environment.worker_environment(
                job,
                placement,
                local_rank=local_rank,
                replacement=replacement,
                error_file=_error_file(own),
            )
            standby = standbys.take(variables, [_descriptor(ends[s]) for s in (Std.OUT, Std.ERR)])
            process = standby.process if standby is not None else _start(job, variables, ends)
        except OSError as e:
            raise LaunchError(f"cannot start the worker of rank {rank}: {e}") from e
        on_failure.pop_all()
    return Worker(
        rank=rank,
        local_rank=local_rank,
        start=start,
        process=process,
        was_standby=standby is not None,
        started=loop.clock.now(),
        folder=own,
        captures=list(captures.values()),
        stderr=captures.get(Std.ERR),
        stderr_file=stderr_file,
        shown=job.routes.to_console(local_rank, Std.ERR),
    )


def _start(
    job: JobSpec, variables: dict[str, str], ends: dict[Std, int | BinaryIO]
) -> subprocess.Popen[bytes]:
    command = job.program.command(environment.python(), job.chaos is not None)
    return subprocess.Popen(
        [sys.executable, "-I", "-S", _SHIM, str(os.getpid()), *command],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=ends[Std.OUT],
        stderr=ends[Std.ERR],
        start_new_session=True,
    )


def _descriptor(end: int | BinaryIO) -> int:
    return end if isinstance(end, int) else end.fileno()


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
    """The last lines of a file, from the offset `start` on."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _TAIL_BYTES))
            return [readable(line) for line in file.read().splitlines()[-KEPT_LINES:]]
    except OSError:
        return []
