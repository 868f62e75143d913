"""One worker process: how it is started, what it writes, what it leaves when it ends."""

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
from outlast.launch.config.job_spec import Job
from outlast.launch.config.streams import Std
from outlast.launch.event_loop import Loop
from outlast.launch.output.console import Console
from outlast.launch.output.worker_output import KEPT_LINES, Capture, readable

__all__ = ["Place", "Worker", "start_worker"]

_TAIL_BYTES = 16 * 1024
_SHIM = str(Path(__file__).with_name("exec_shim.py"))


@dataclasses.dataclass(frozen=True)
class Place:
    """Which process of the job this is.

    Attributes:
        local_rank: its rank.
        attempt: how often all workers were restarted before it.
        replacement: how often this rank was replaced in this attempt.
        start: how often this rank was started before, for whichever reason.
    """

    local_rank: int
    attempt: int = 0
    replacement: int = 0
    start: int = 0


@dataclasses.dataclass
class Worker:
    """A running worker process, and what belongs to it."""

    place: Place
    process: subprocess.Popen[bytes]
    started: float
    folder: Path
    captures: list[Capture]
    stderr: Capture | None
    stderr_file: tuple[Path, int] | None

    @property
    def pid(self) -> int:
        """Its process, and the leader of its session and process group."""
        return self.process.pid

    def ended(self, exit_code: int) -> None:
        """Note that the process was reaped; takes what it wrote last."""
        self.process.returncode = exit_code  # or subprocess would wait for it again
        for capture in self.captures:
            capture.drain()

    def error_time(self) -> float | None:
        """When it wrote its error file (in the time of the file system), if it did."""
        try:
            return _error_file(self.folder).stat().st_mtime
        except OSError:
            return None

    def last_words(self) -> tuple[str, str]:
        """What it says of its end, and where that is from: `traceback`, `stderr` or nothing."""
        traceback = _traceback(_error_file(self.folder))
        if traceback:
            return traceback, "traceback"
        if self.stderr is not None:
            lines = list(self.stderr.last)
        elif self.stderr_file is not None:
            lines = _tail(*self.stderr_file)
        else:
            lines = []
        return "\n".join(lines), "stderr" if lines else ""

    def close(self) -> None:
        """Give back its pipes and files."""
        for capture in self.captures:
            capture.close()


def start_worker(
    job: Job, place: Place, *, folder: Path, port: int, loop: Loop, console: Console
) -> Worker:
    """Start a worker in a session of its own, in `folder/attempt_N/RANK/`.

    Raises:
        LaunchError: if the system has no room for another process.
    """
    rank = place.local_rank
    own = folder / f"attempt_{place.start}" / str(rank)
    captures: dict[Std, Capture] = {}
    stderr_file = None
    with contextlib.ExitStack() as ours_alone, contextlib.ExitStack() as if_it_fails:
        ends: dict[Std, int | BinaryIO] = {}
        try:
            own.mkdir(parents=True, exist_ok=True)
            _error_file(own).unlink(missing_ok=True)  # of an earlier run of the same name
            for stream, name in ((Std.OUT, "stdout.log"), (Std.ERR, "stderr.log")):
                file: BinaryIO | None = None
                if job.routes.to_file(rank, stream):
                    file = (own / name).open("ab", buffering=0)
                    if_it_fails.callback(file.close)
                    if not job.routes.to_console(rank, stream):
                        # Straight into the file: it goes on even when nobody reads.
                        ends[stream] = ours_alone.enter_context(file)
                        if stream is Std.ERR:
                            stderr_file = (own / name, file.tell())
                        continue
                read, write = os.pipe()
                ours_alone.callback(os.close, write)
                ends[stream] = write
                shown = rank in job.routes.shown
                outlet = console.stdout if stream is Std.OUT else console.stderr
                captures[stream] = Capture(
                    loop,
                    read,
                    console.prefix(rank, int(stream)),
                    outlet if shown else None,
                    file,
                )
                if_it_fails.callback(captures[stream].close)
            command = job.program.command(environment.python(), job.chaos is not None)
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", _SHIM, str(os.getpid()), *command],
                env=environment.worker_environment(
                    job,
                    local_rank=rank,
                    attempt=place.attempt,
                    replacement=place.replacement,
                    port=port,
                    error_file=_error_file(own),
                ),
                stdin=subprocess.DEVNULL,
                stdout=ends[Std.OUT],
                stderr=ends[Std.ERR],
                start_new_session=True,
            )
        except OSError as e:
            raise LaunchError(f"cannot start the worker of rank {rank}: {e}") from e
        if_it_fails.pop_all()
    return Worker(
        place=place,
        process=process,
        started=loop.clock.now(),
        folder=own,
        captures=list(captures.values()),
        stderr=captures.get(Std.ERR),
        stderr_file=stderr_file,
    )


def _error_file(folder: Path) -> Path:
    return folder / "error.json"


def _traceback(path: Path) -> str:
    """What torch's `@record` wrote: the traceback, or else the message."""
    try:
        message = json.loads(path.read_text(errors="replace"))["message"]
        if isinstance(message, dict):
            extra = message.get("extraInfo") or {}
            message = extra.get("py_callstack") or message.get("message") or ""
        return str(message).rstrip()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""  # there is none, or a dying process wrote half of it


def _tail(path: Path, start: int) -> list[str]:
    """The last lines of a file from `start` on."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _TAIL_BYTES))
            return [readable(line) for line in file.read().splitlines()[-KEPT_LINES:]]
    except OSError:
        return []
