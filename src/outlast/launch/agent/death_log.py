"""The deaths of workers, the exceptions that ended them, and the decision on each; at the end of
the job its first cause.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import signal
from collections.abc import Sequence

from outlast.coordination.job_record import JobState
from outlast.coordination.records import process_name
from outlast.errors import NO_RESTART
from outlast.events.restart_causes import DIED, RestartCount, split_exception, what_failed
from outlast.events.types import WorkerFailed
from outlast.launch.agent.decisions import Decision, JobRecord
from outlast.system.error_text import exit_summary, exit_text
from outlast.system.frames import place_in_user_code

EARLY = "before it reached the wrapped function"
_FAULTS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_RANK = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
"""What torch puts before each line of a traceback."""
_START = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(.+)", line (\d+)(?:, in (.+))?$')
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Abort)\b")
"""The line of an exception that has no traceback: a script that cannot be parsed, C++ code."""
_CHAINED = ("During handling of the above exc", "The above exception was the direct cause")
"""What Python writes, between two empty lines, above a traceback with a context or a cause."""
_BY_PDB = ("BdbQuit", "bdb.BdbQuit")
_DEBUGGING = (
    "breakpoint() and pdb need a terminal, and the workers of a job have none: debug a single "
    "process with `python SCRIPT`"
)


@dataclasses.dataclass(frozen=True)
class Raised:
    """An exception: `KeyError: 'x'`, and `train.py:16`; the place is empty if it is not known."""

    error: str
    place: str = ""

    def told(self, of: str = "") -> str:
        """`KeyError at train.py:16 (rank 1): 'x'`, with ` (rank 1)` as `of`. The message is last,
        because it may be long, or several sentences.
        """
        found = split_exception(self.error)
        kind, message = self.error, ""  # of a rank that hangs, for example
        if found is not None:
            kind, message = found[0] + found[1].rpartition(".")[2], found[2]
        return f"{kind}{f' at {self.place}' if self.place else ''}{of}{message}"

    def repeats(self, other: Raised) -> bool:
        """Whether it is the other error again, or the message of another rank about it."""
        return self == other or self.error.endswith(f" {other.error.rpartition('.errors.')[2]}")

    @property
    def advice(self) -> str:
        return _DEBUGGING if self.error.startswith(_BY_PDB) else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Death:
    """The end of a worker that was not told to end."""

    rank: int
    pid: int
    exit_code: int  # negative for a signal
    when: float  # time of the failure: of its error file if it wrote one, else of its end
    decision: Decision  # the launcher's decision
    local_rank: int = 0
    last_output: str = ""  # the worker's traceback, or its last lines on stderr
    source: str = ""  # the kind of `last_output`: `traceback` or `stderr`; empty for neither
    shown: bool = False  # whether the launcher has passed on what it wrote on stderr
    killer: str = ""  # who has killed it, as far as that is known
    early: bool = False  # whether it had not reached the wrapped function, in a script that has one
    host: str = ""  # name of its host; empty for this one
    host_id: str = ""  # of its host in the job; empty if the job has one host

    @property
    def process(self) -> str:
        return process_name(self.host_id, self.pid)

    @functools.cached_property
    def _raised(self) -> Raised | None:
        return raised(self.last_output)

    @property
    def error(self) -> Raised | None:
        """The exception that ended it, if its output ends with one."""
        return self._raised if self.exit_code in (1, NO_RESTART) else None

    def who(self, host: str = "") -> str:
        """`rank 1 (pid 17, host h1)`; `host` is the name of this host, or empty to name none."""
        named = f", host {self.host or host}" if host else ""
        return f"rank {self.rank} (pid {self.pid}{named})"

    @property
    def how(self) -> str:
        """How it ended: `failed with KeyError at train.py:16: 'x'`, `exited with code 3`, `was
        killed by SIGKILL from outside`.
        """
        by = f" from {self.killer}" if self.killer else ""
        more = f"{by}{f' {EARLY}' if self.early else ''}"
        if self.error is None:
            return f"{exit_text(self.exit_code)}{more}"
        return f"failed with {self.error.told(more)}"

    @property
    def message(self) -> str:
        lines = without_ranks(self.last_output).splitlines()
        return self._raised.error if self._raised is not None else lines[-1] if lines else ""

    def event(self) -> WorkerFailed:
        return WorkerFailed(
            rank=self.rank,
            worker_pid=self.pid,
            exit_code=self.exit_code,
            decision=self.decision.value,
            failed_time=self.when,
            message=self.message,
        )


def restart_counts(deaths: Sequence[Death], job: JobRecord) -> tuple[RestartCount, ...]:
    """The restarts of a job by cause: in place, and of all processes. The ranks know only that one
    of them died; how it did is said if all of this launcher's ended in the same way.
    """
    counts, replaced = [], (Decision.REPLACED, Decision.LOST)
    ends = {exit_summary(death.exit_code) for death in deaths if death.decision in replaced}
    for death in deaths:
        if death.decision is Decision.RESTARTED:
            place = death.error.place if death.error else ""
            what = what_failed("WORKER_FAILED", death.message, place, exit_summary(death.exit_code))
            counts.append(RestartCount.of(what, death.rank))
    how = ends.pop() if len(ends) == 1 else DIED
    in_place = (dataclasses.replace(c, what=how) if c.what == DIED else c for c in job.restarts)
    return (*counts, *in_place)


def failure_times(ended: Sequence[tuple[int, float | None]], now: float) -> list[float]:
    """The failure times of workers whose ends were seen together, at `now`, by exit code and time
    of the error file. That time is exact. A process ends later than it fails, so one without such a
    file failed no later than `now`. But a worker killed by a signal did not fail because of a peer,
    while a peer may well have failed because of that worker: it counts as the first.
    """
    times = [now if written is None else min(written, now) for _, written in ended]
    return [
        min(times) if -code in _FAULTS else time
        for (code, _), time in zip(ended, times, strict=True)
    ]


def first_cause(deaths: Sequence[Death], job: JobRecord) -> Death | None:
    """The first failure from which the job did not recover; `None` if the job succeeded.

    A completed call of a wrapped function is a success, even if ranks were lost before, unless a
    process that completed it failed afterwards. A job that stopped because it was told to ends with
    the exit code of its stop, whatever was lost before.
    """
    blamed = {Decision.FATAL, Decision.FAILED}
    if job.state is JobState.RUNNING and any(d.decision is Decision.STOPPED for d in deaths):
        blamed |= {Decision.STOPPED}
    elif job.state is not JobState.COMPLETED:
        blamed |= {Decision.LOST, Decision.STOPPED}
    return min(
        (death for death in deaths if death.decision in blamed),
        # All ranks of an aborted job end together: the one that has printed the cause stands first.
        key=lambda death: (death.process != job.reporter, death.when),
        default=None,
    )


def raised(output: str) -> Raised | None:
    """The exception that ended a worker with this output; `None` if there is none in it."""
    lines = without_ranks(output).splitlines()
    last = from_last_traceback(lines)
    start = max((n for n, line in enumerate(last) if line == _START), default=-1)
    if start < 0:
        errors = [line for line in lines if _ERROR.match(line)]
        return Raised(errors[-1], _place(lines)) if errors else None
    after = last[start + 1 :]
    error = next((line for line in after if line and not line.startswith(" ")), "")
    return Raised(error, _place(after)) if error else None


def without_ranks(output: str) -> str:
    """The output without torch's prefixes."""
    return _RANK.sub("", output)


def from_last_traceback(lines: list[str]) -> list[str]:
    """The lines from the last traceback on, with the tracebacks that it is chained to."""
    starts = [i for i, line in enumerate(lines) if line.startswith(_START)]
    while len(starts) > 1 and lines[starts[-1] - 2].startswith(_CHAINED):
        starts.pop()
    return lines[starts[-1] :] if starts else lines


def _place(lines: list[str]) -> str:
    found = [frame for line in lines if (frame := _FRAME.fullmatch(line)) is not None]
    frames = [(frame[1], int(frame[2]), frame[3] or "") for frame in reversed(found)]
    return place_in_user_code(frames).partition(" in ")[0]
