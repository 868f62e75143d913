"""What the end of a worker leads to: the rules of the launcher, in one pure function."""

from __future__ import annotations

import dataclasses
import enum
import json

__all__ = ["Fate", "JobRecord", "JobState", "decide", "replacements"]

DEFAULT_REPLACEMENTS = 3
"""Of a job that uses `Wrapper`; any other job has no restarts by default, as with torchrun."""

TOLD_TO_STOP = 143
"""128 + SIGTERM: what a worker exits with that has handled the signal, `outlast.Job`'s above all.
One that the signal has killed has no exit code, and is replaced.
"""


class JobState(enum.Enum):
    """What `outlast.inprocess.Wrapper` tells the launcher through the store."""

    PLAIN = "plain"
    """Nothing: the script does not use it, or has not called it yet."""
    RUNNING = "running"
    COMPLETED = "completed"
    ABORTED = "aborted"


@dataclasses.dataclass(frozen=True)
class JobRecord:
    """The value of the key `outlast/job` in the launcher's store.

    Attributes:
        state: of the latest call of a wrapped function.
        pids: the processes that completed it, where the record names them. One of these that
            fails afterwards fails the job; any other was lost on the way.
    """

    state: JobState = JobState.PLAIN
    pids: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, value: bytes | None) -> JobRecord:
        """The record in the store's value; what cannot be read counts as a running call.

        The launcher outlives a wrapper of another version better by keeping survivors than by
        ending them, so an unknown record still says that a wrapper is there.
        """
        if value is None:
            return cls()
        try:
            fields = json.loads(value)
            return cls(JobState(fields["state"]), frozenset(fields.get("pids", ())))
        except (ValueError, TypeError, KeyError):
            return cls(JobState.RUNNING)


class Fate(enum.Enum):
    """What became of a worker's rank when the worker ended."""

    DONE = "done"
    """Exit code 0: there is nothing more to do for this rank."""
    REPLACED = "replaced"
    """A new process takes its place; the others go on."""
    LOST = "lost"
    """No new process; the others go on without it."""
    RESTARTED = "restarted"
    """All workers are ended, and all are started from scratch."""
    FATAL = "fatal"
    """The job ends: all workers are ended."""
    STOPPED = "told to stop"
    """It saved and left because it was told to (`outlast.Job`): no new process."""
    FAILED = "failed"
    """Its part was over (completed or aborted) when it failed; the others go on."""
    ENDED = "ended"
    """It was told to end, or fell with the failure of another."""


def replacements(max_restarts: int | None) -> int:
    """How many workers of a job that uses `Wrapper` are replaced."""
    return DEFAULT_REPLACEMENTS if max_restarts is None else max_restarts


def decide(exit_code: int, pid: int, job: JobRecord, used: int, max_restarts: int | None) -> Fate:
    """What follows when a worker of a running job ends by itself, or by a fault.

    `REPLACED` and `RESTARTED` each take one of the restarts, of which `used` are gone.
    """
    if exit_code == 0:
        return Fate.DONE
    if job.state is JobState.PLAIN:
        return Fate.RESTARTED if used < (max_restarts or 0) else Fate.FATAL
    if job.state is JobState.RUNNING and exit_code == TOLD_TO_STOP:
        return Fate.STOPPED
    if job.state is JobState.RUNNING:
        return Fate.REPLACED if used < replacements(max_restarts) else Fate.LOST
    if job.state is JobState.COMPLETED and pid not in job.pids:
        return Fate.LOST
    return Fate.FAILED
