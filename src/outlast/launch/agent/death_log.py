"""The deaths of workers and the decision on each; at the end of the job its first cause, its exit
code, and the summary that the launcher prints.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Sequence

from outlast.coordination.records import process_name
from outlast.errors import NO_RESTART
from outlast.events import WorkerFailed
from outlast.events.restart_causes import RestartCount, describe_restarts, what_failed
from outlast.launch.agent.decisions import Decision, JobRecord, JobState
from outlast.launch.workers.worker import Worker
from outlast.system.error_text import exit_summary, exit_text
from outlast.system.units import duration_text

_RANK = re.compile(r"^\[rank\d+\]: ?")
"""What torch puts before each line of a traceback."""
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Abort)\b")
"""The line of a traceback with the exception; C++ code may write more lines after it."""
_CHAINED = ("During handling of the above exc", "The above exception was the direct cause")
"""What Python writes, between two empty lines, above a traceback with a context or a cause."""
_FAULTS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Death:
    """The end of a worker that was not told to end.

    Attributes:
        exit_code: negative for a signal.
        when: time of the failure: of its error file if it wrote one, else of its end.
        decision: the launcher's decision.
        last_output: the worker's traceback, or its last lines on stderr.
        source: the kind of `last_output`: `traceback` or `stderr`; empty for neither.
        host: name of its host; empty for this one.
        host_id: of its host in the job; empty if the job has one host.
    """

    rank: int
    pid: int
    exit_code: int
    when: float
    decision: Decision
    local_rank: int = 0
    last_output: str = ""
    source: str = ""
    host: str = ""
    host_id: str = ""

    @property
    def process(self) -> str:
        """The name of the process in the whole job."""
        return process_name(self.host_id, self.pid)

    def event(self) -> WorkerFailed:
        """The death as an event."""
        lines = [_RANK.sub("", line) for line in self.last_output.splitlines()]
        errors = [line for line in lines if _ERROR.match(line)]
        *_, message = errors or lines or [""]
        return WorkerFailed(
            rank=self.rank,
            worker_pid=self.pid,
            exit_code=self.exit_code,
            decision=self.decision.value,
            failed_time=self.when,
            message=message,
        )


class DeathLog:
    """The deaths of a job, in the order of the decisions on them."""

    def __init__(self) -> None:
        self.deaths: list[Death] = []

    def record(
        self, worker: Worker, exit_code: int, when: float, decision: Decision, host_id: str
    ) -> Death:
        """Record a death, with the last output of the worker."""
        last_output, source = worker.last_output()
        death = Death(
            rank=worker.slot.rank,
            local_rank=worker.slot.local_rank,
            pid=worker.pid,
            exit_code=exit_code,
            when=when,
            decision=decision,
            last_output=last_output,
            source=source,
            host_id=host_id,
        )
        self.deaths.append(death)
        return death

    def not_replaced(self, death: Death) -> Death:
        """Correct a death that was to be replaced and was not."""
        lost = dataclasses.replace(death, decision=Decision.LOST)
        self.deaths[self.deaths.index(death)] = lost
        return lost


def restart_counts(deaths: Sequence[Death], job: JobRecord) -> tuple[RestartCount, ...]:
    """The restarts of a job by cause: in place, and of all processes."""
    counts = []
    for death in deaths:
        if death.decision is Decision.RESTARTED:
            message = death.event().message
            what = what_failed("WORKER_FAILED", message, "", exit_summary(death.exit_code))
            counts.append(RestartCount.of(what, death.rank))
    return (*counts, *job.restarts)


def failure_times(ended: Sequence[tuple[int, float | None]], now: float) -> list[float]:
    """The failure times of workers whose ends were seen together, at `now`.

    The time in an error file is exact. A process ends later than it fails, so one without such a
    file failed no later than `now`. But a worker killed by a signal did not fail because of a peer,
    while a peer may well have failed because of that worker: it counts as the first.

    Args:
        ended: exit code, and time of the error file if there is one.
        now: the time at which the ends were seen.
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


def exit_code(cause: Death | None, received: signal.Signals | None) -> int:
    """The exit code of the job: 128 + n if signal n ended it; else that of the first cause (128 + n
    if signal n killed that worker); else 0.
    """
    if received is not None:
        return 128 + received
    if cause is None:
        return 0
    return cause.exit_code if cause.exit_code > 0 else 128 - cause.exit_code


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a job has ended.

    Attributes:
        cause: the first failure from which it did not recover.
        received: the signal to the launcher that ended it.
        text: why it has failed, if no worker is the cause.
        saved: whether the last save of a stop was made.
        unsaved: whether the job was told to stop, and that save was not made.
        seconds: since the start of the job, or since this host has joined it.
        restarts: by cause.
        joined_late: whether this host joined a job that ran already.
        links: which links between hosts were broken, in words.
    """

    cause: Death | None
    received: signal.Signals | None
    saved: bool
    seconds: float
    unsaved: bool = False
    text: str = ""
    restarts: tuple[RestartCount, ...] = ()
    joined_late: bool = False
    links: tuple[str, ...] = ()

    @property
    def stopped(self) -> bool:
        """Whether it ended because it was told to, by itself."""
        told = self.cause is not None and self.cause.decision is Decision.STOPPED
        return self.saved if self.received is not None else told

    @property
    def failed(self) -> bool:
        """Whether nobody asked for this end."""
        caused = self.cause is not None or bool(self.text)
        return self.received is None and caused and not self.stopped

    @property
    def exit_code(self) -> int:
        """The exit code of the job."""
        return 1 if self.failed and self.cause is None else exit_code(self.cause, self.received)


def summary(deaths: Sequence[Death], ending: Ending, host: str) -> list[str]:
    """The last lines of a job. A failed job's first cause comes after its other failures, and its
    traceback last; otherwise the last line tells how the job has ended. Ranks that exited with 93
    because of the first cause are not failures of their own.
    """
    cause = ending.cause if ending.failed else None
    others = [
        death
        for death in sorted(deaths, key=lambda death: death.when)
        if (cause is None or death.process != cause.process)
        and not (ending.stopped and death.decision is Decision.STOPPED)
        and not (cause is not None and cause.exit_code == death.exit_code == NO_RESTART)
    ]
    lines = ["broken links between hosts, as they were found:"] if ending.links else []
    lines.extend(f"  {text}" for text in ending.links)
    lines += ["failures:"] if others and cause is None else ["other failures:"] if others else []
    lines.extend(
        f"  {_where(death, host)} {exit_text(death.exit_code)}: {death.decision.value}"
        for death in others
    )
    code, after = f", exit code {ending.exit_code}", _after(ending)
    then = f",{after}" if after.startswith(" ") else after
    if ending.stopped:
        signal_ = "as told" if ending.received is None else f"by {ending.received.name}"
        saved = "NOT saved, a fault prevented the last save" if ending.unsaved else "saved"
        lines.append(f"job stopped {signal_}: {saved}{code}{then}")
    elif ending.received is not None:
        unsaved = ": NOT saved" if ending.unsaved else ""
        lines.append(f"job ended by {ending.received.name}{unsaved}{code}{then}")
    elif cause is not None:
        lines.append(f"job failed{code}{then}")
        lines.append(f"first cause: {_where(cause, host)} {exit_text(cause.exit_code)}")
        if cause.last_output:
            lines.append("traceback:" if cause.source == "traceback" else "last lines on stderr:")
            output = cause.last_output.splitlines()
            if cause.exit_code == NO_RESTART:  # the equal faults before it have the same traceback
                output = from_last_traceback(output)
            lines.extend(f"  {line}" for line in output)
    elif ending.failed:
        lines += [f"job failed{code}{then}", f"first cause: {ending.text}"]
    else:
        lines.append(f"job completed{after}")
    return lines


def _after(ending: Ending) -> str:
    """After how long and which restarts. A host that joined late knows only its own time."""
    took, restarts = duration_text(ending.seconds), describe_restarts(ending.restarts)
    if ending.joined_late:
        return f"{restarts and f' after {restarts}'}; this host took part for {took}"
    return f" after {took}{restarts and f' and {restarts}'}"


def from_last_traceback(lines: list[str]) -> list[str]:
    """The lines from the last traceback on, with the tracebacks that it is chained to."""
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call")]
    while len(starts) > 1 and lines[starts[-1] - 2].startswith(_CHAINED):
        starts.pop()
    return lines[starts[-1] :] if starts else lines


def _where(death: Death, host: str) -> str:
    return f"rank {death.rank} (pid {death.pid}, host {death.host or host})"
