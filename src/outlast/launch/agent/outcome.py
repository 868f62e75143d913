"""What is said at the end: the exit code, the first cause, and what happened on the way. Pure."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence

from outlast.launch.agent.decisions import Fate, JobRecord, JobState
from outlast.system.exit_text import exit_text

__all__ = ["Death", "exit_code", "first_cause", "last_lines", "moments"]

_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Death:
    """The end of a worker that was not told to end.

    Attributes:
        rank: its rank; of the whole job, on one node.
        pid: its process.
        exit_code: negative for a signal.
        when: the moment of the failure: of its error file if it wrote one, else of its end.
        fate: what came of it.
        words: its traceback, or its last lines on stderr.
        source: which of the two.
    """

    rank: int
    pid: int
    exit_code: int
    when: float
    fate: Fate
    words: str = ""
    source: str = ""


def moments(ended: Sequence[tuple[int, float | None]], now: float) -> list[float]:
    """When workers failed whose ends were seen together, at `now`, as (exit code, error time).

    The time in an error file is exact. The end of a process comes later than its failure, so one
    without such a file failed at `now` at the latest. But whom a signal struck did not fail
    because of a peer, and a peer may well have failed because of it: it counts as the first.
    """
    times = [now if written is None else min(written, now) for _, written in ended]
    return [
        min(times) if code in _FROM_OUTSIDE else time
        for (code, _), time in zip(ended, times, strict=True)
    ]


def first_cause(deaths: Sequence[Death], job: JobRecord) -> Death | None:
    """The first failure from which the job did not recover; none if it has succeeded.

    A completed call of a wrapped function is a success, whoever was lost on the way, unless a
    process that completed it failed afterwards.
    """
    blamed = {Fate.FATAL, Fate.FAILED}
    if job.state is not JobState.COMPLETED:
        blamed |= {Fate.LOST, Fate.STOPPED}
    return min(
        (death for death in deaths if death.fate in blamed),
        key=lambda death: death.when,
        default=None,
    )


def exit_code(cause: Death | None, received: signal.Signals | None) -> int:
    """Of the whole job: 128 + n for a signal that ended it; else the first cause's, for which a
    signal counts as 128 + n too; else 0.
    """
    if received is not None:
        return 128 + received
    if cause is None:
        return 0
    return cause.exit_code if cause.exit_code > 0 else 128 - cause.exit_code


def last_lines(
    deaths: Sequence[Death], job: JobRecord, received: signal.Signals | None, host: str
) -> list[str]:
    """The story in a few lines; empty for a job in which nothing happened."""
    cause = None if received is not None else first_cause(deaths, job)
    code = exit_code(cause, received)
    lines = []
    if received is not None:
        lines.append(f"job ended by {received.name}, exit code {code}")
    elif cause is not None:
        lines.append(f"job failed, exit code {code}")
        lines.append(f"first cause: {_where(cause, host)} {exit_text(cause.exit_code)}")
        if cause.words:
            lines.append("traceback:" if cause.source == "traceback" else "its last lines:")
            lines.extend(f"  {line}" for line in cause.words.splitlines())
    elif deaths:
        lines.append("job completed")
    others = [death for death in deaths if death is not cause]
    if others:
        lines.append("on the way:" if cause is None else "also:")
        lines.extend(
            f"  {_where(death, host)} {exit_text(death.exit_code)}: {death.fate.value}"
            for death in sorted(others, key=lambda death: death.when)
        )
    return lines


def _where(death: Death, host: str) -> str:
    return f"rank {death.rank} (pid {death.pid}, host {host})"
