"""The launcher's rules: its decision when a worker ends, as one pure function."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence

from outlast.coordination.job_record import CallRecord, JobState
from outlast.errors import NO_RESTART
from outlast.events.fault_record import FaultRecord
from outlast.events.restart_causes import RestartCount
from outlast.system.units import duration_text

DEFAULT_REPLACEMENTS = 3
"""The default for a job that uses `Wrapper`; any other job has no restarts, as with torchrun."""

TOLD_TO_STOP = 143
"""128 + SIGTERM: the exit code of a worker that handled the signal, as `outlast.Job` does. A worker
that the signal killed has no exit code and is replaced.
"""


@dataclasses.dataclass(frozen=True)
class JobRecord(CallRecord):
    """The record of the newest call, and what else the store has of it."""

    # the names of the processes that completed it. If one of these fails afterwards, the job fails;
    # any other was lost before the completion.
    completed_by: frozenset[str] = frozenset()
    # whether the job was told to stop, by a signal to a worker or by `Job.stop`
    stopping: bool = False
    # whether it was told to stop, and has not completed the save that this requires
    unsaved: bool = False
    # of all calls, by cause, as the ranks have counted them
    restarts: tuple[RestartCount, ...] = ()
    # the one with which the ranks have ended the job
    fault: FaultRecord | None = None
    # differs once the training has come further than ever before; empty until then
    progress: str = ""
    # Of one rank and process (`JobKeys.job`): whether any process of this rank has reached the
    # call; why its monitor has killed this process, empty if it has not; and why its replacement
    # does not count against `--max-restarts`, empty if it does.
    has_come: bool = False
    killed: str = ""
    uncounted: str = ""

    @property
    def saved(self) -> bool:
        """Whether it was told to stop, and has completed the save that this requires."""
        return self.stopping and not self.unsaved


class Decision(enum.Enum):
    """The launcher's decision when a worker ends."""

    DONE = "done"
    """Exit code 0: its rank is done."""
    REPLACED = "replaced"
    """A new process gets its rank; the other ranks continue."""
    LOST = "lost"
    """No new process; the other ranks continue without it."""
    RESTARTED = "restarted"
    """All workers are terminated and restarted from scratch."""
    FATAL = "fatal"
    """The job ends: all workers are terminated."""
    STOPPED = "told to stop"
    """It saved and exited because it was told to (`outlast.Job`): no new process."""
    FAILED = "failed"
    """It failed after its call had completed or aborted; the other ranks continue."""


def replacements(max_restarts: int | None) -> int:
    """The number of replacements that a job with `Wrapper` may use."""
    return DEFAULT_REPLACEMENTS if max_restarts is None else max_restarts


def faults_that_count(
    faults: Sequence[tuple[str, float]], progress: str, now: float, window_s: float
) -> int:
    """How many of the faults that were restarted from count against the limit: those of the last
    `window_s` seconds; without that, those after which there was no progress. Each is given by what
    `JobRecord.progress` was then, and its time.
    """
    if window_s < math.inf:
        return sum(now - at <= window_s for _, at in faults)
    return sum(before == progress for before, _ in faults)


def limit_text(limit: int, window_s: float) -> str:
    """What a limit of replacements counts, in words."""
    within = "without a further training step"
    if window_s < math.inf:
        within = f"within {duration_text(window_s)}"
    return f"--max-restarts: {limit} {within}"


def decide(
    exit_code: int,
    process: str,
    job: JobRecord,
    used: int,
    max_restarts: int | None,
    wrapped: bool = False,
    early: bool = False,
) -> Decision:
    """Decide how to proceed when a worker of a running job ends by itself or by a fault.

    A worker that exits with 93 says that a restart would not help: it is never started again.
    `REPLACED` and `RESTARTED` each consume one of the restarts, of which `used` are already used.

    Args:
        wrapped: whether the script has a wrapped function, which may not have been reached yet.
            There the ranks wait for each other; so a worker that is killed on the way is replaced
            alone. An error on the way comes again: it ends the job.
        early: whether no process of this rank has reached the call, which others have, and which
            waits for all: the same, whichever rank was faster.
    """
    if exit_code == 0:
        return Decision.DONE
    if job.state is JobState.PLAIN:
        if wrapped and exit_code < 0 and used < replacements(max_restarts):
            return Decision.REPLACED
        if exit_code == NO_RESTART:
            return Decision.FATAL
        return Decision.RESTARTED if used < (max_restarts or 0) else Decision.FATAL
    if job.state is JobState.RUNNING and exit_code == TOLD_TO_STOP:
        return Decision.STOPPED
    if job.state is JobState.RUNNING and job.stopping:
        return Decision.LOST  # the others do not wait for it: they save and leave
    if job.state is JobState.RUNNING and early and exit_code > 0 and used >= (max_restarts or 0):
        return Decision.FATAL
    if job.state is JobState.RUNNING and exit_code == NO_RESTART:
        return Decision.LOST
    if job.state is JobState.RUNNING:
        return Decision.REPLACED if used < replacements(max_restarts) else Decision.LOST
    if job.state is JobState.COMPLETED and process not in job.completed_by:
        return Decision.LOST
    return Decision.FAILED


def why_not_replaced(exit_code: int, job: JobRecord, leaves: bool, stuck: bool) -> str:
    """Why a worker is lost, in words; empty if all replacements are used."""
    reasons = {
        "the job is completed": job.state is JobState.COMPLETED,
        "the job was told to stop": job.stopping,
        "this host leaves the job": leaves,
        "its devices are not used again": stuck,
        f"as its exit code {exit_code} asks": exit_code == NO_RESTART,
    }
    return next((why for why, holds in reasons.items() if holds), "")
