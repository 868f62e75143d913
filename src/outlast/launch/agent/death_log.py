"""The deaths of workers and the decision on each; at the end of the job its first cause."""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Sequence

from outlast.coordination.records import process_name
from outlast.errors import NO_RESTART
from outlast.events import WorkerFailed
from outlast.events.restart_causes import DIED, RestartCount, what_failed
from outlast.launch.agent.decisions import Decision, JobRecord, JobState
from outlast.launch.output.raised import Raised, raised, without_ranks
from outlast.launch.workers.worker import Worker
from outlast.system.error_text import exit_summary, exit_text

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
        shown: whether the launcher has passed on what it wrote on stderr.
        killer: who has killed it, as far as that is known.
        early: whether it had not reached the wrapped function, in a script that has one.
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
    shown: bool = False
    killer: str = ""
    early: bool = False
    host: str = ""
    host_id: str = ""

    @property
    def process(self) -> str:
        """The name of the process in the whole job."""
        return process_name(self.host_id, self.pid)

    @functools.cached_property
    def error(self) -> Raised | None:
        """The exception that ended it, if its output ends with one."""
        return raised(self.last_output) if self.exit_code in (1, NO_RESTART) else None

    @property
    def how(self) -> str:
        """How it ended: `failed with KeyError at train.py:16: 'x'`, `exited with code 3`, `was
        killed by SIGKILL from outside`.
        """
        by = f" from {self.killer}" if self.killer else ""
        more = f"{by}{' before it reached the wrapped function' if self.early else ''}"
        if self.error is None:
            return f"{exit_text(self.exit_code)}{more}"
        return f"failed with {self.error.told(more)}"

    def event(self) -> WorkerFailed:
        """The death as an event."""
        lines = without_ranks(self.last_output).splitlines()
        error = raised(self.last_output)
        return WorkerFailed(
            rank=self.rank,
            worker_pid=self.pid,
            exit_code=self.exit_code,
            decision=self.decision.value,
            failed_time=self.when,
            message=error.error if error is not None else lines[-1] if lines else "",
        )


class DeathLog:
    """The deaths of a job, in the order of the decisions on them."""

    def __init__(self) -> None:
        self.deaths: list[Death] = []

    def record(
        self,
        worker: Worker,
        exit_code: int,
        when: float,
        decision: Decision,
        host_id: str,
        *,
        killer: str = "",
        early: bool = False,
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
            shown=worker.shown,
            killer=killer,
            early=early,
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
    """The restarts of a job by cause: in place, and of all processes. The ranks know only that one
    of them died; how it did is said if all of this launcher's ended in the same way.
    """
    counts, replaced = [], (Decision.REPLACED, Decision.LOST)
    ends = {exit_summary(death.exit_code) for death in deaths if death.decision in replaced}
    for death in deaths:
        if death.decision is Decision.RESTARTED:
            message, place = death.event().message, death.error.place if death.error else ""
            what = what_failed("WORKER_FAILED", message, place, exit_summary(death.exit_code))
            counts.append(RestartCount.of(what, death.rank))
    how = ends.pop() if len(ends) == 1 else DIED
    in_place = (dataclasses.replace(c, what=how) if c.what == DIED else c for c in job.restarts)
    return (*counts, *in_place)


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
