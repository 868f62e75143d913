"""The whole exception tree of `outlast`.

Two roots: the world went wrong (`OutlastError`), or `outlast` was misused, which is told with the
built-in `ValueError` and `TypeError`, naming the argument. Control flow that must pass through
user code unharmed derives from `BaseException`, so that `except Exception` does not catch it::

    Exception
    +-- OutlastError                     something failed that the caller did not cause
        +-- RestartError                 the restart in place cannot go on for this rank
        |   +-- HealthCheckError         this rank must not take part any longer
        |   +-- InternalError            a promise of outlast itself was broken: please report
        |   +-- TimeoutError             a wait for other ranks took longer than allowed
        |   +-- StoreError               the store is out of reach; names host and port
        |   +-- RankLostError            the other ranks went on without this one
        |   +-- RankDiscarded            the rank assignment left this rank out
        |   +-- FaultCounterExceeded     this rank had more faults than it may have
        +-- RankFault                    the first cause of a restart, as reported by its rank
        +-- LaunchError                  a job could not be started
        +-- ChaosError                   a fault plan is wrong, or a planned exception
        +-- EventLogError                an event log cannot be read
        +-- AsyncCallError               a background call failed on some rank
        +-- CheckpointError              a checkpoint cannot be written, found or believed
    BaseException
    +-- RankShouldRestart                raised in the training function to interrupt it
    +-- RestartAbort                     ends the job on every rank

Each error that is about a rank names the rank, its host and the first cause.
"""

from __future__ import annotations

import builtins

__all__ = [
    "AsyncCallError",
    "ChaosError",
    "CheckpointError",
    "EventLogError",
    "FaultCounterExceeded",
    "HealthCheckError",
    "InternalError",
    "LaunchError",
    "OutlastError",
    "RankDiscarded",
    "RankFault",
    "RankLostError",
    "RankShouldRestart",
    "RestartAbort",
    "RestartError",
    "StoreError",
    "TimeoutError",
]


class OutlastError(Exception):
    """Root of the errors that the world causes. Misuse is a `ValueError` or `TypeError`."""


class RestartError(OutlastError):
    """The restart in place cannot go on for this rank."""


class HealthCheckError(RestartError):
    """A health check found that this rank must not take part any longer."""


class InternalError(RestartError):
    """A promise that `outlast` makes was broken. This is a defect: please report it."""


class TimeoutError(RestartError, builtins.TimeoutError):
    """A wait for other ranks took longer than the documented timeout."""


class StoreError(RestartError):
    """The store through which the ranks talk cannot be reached; names its host and port."""


class RankLostError(RestartError):
    """The other ranks went on without this one, which they took for lost."""


class RankDiscarded(RestartError):
    """The rank assignment left this (healthy) rank out of the next iteration."""


class FaultCounterExceeded(RestartError):
    """This rank had more faults than `FaultCounter` allows."""


class RankFault(OutlastError):
    """The first cause of a restart, as its rank reported it; `__cause__` of what followed.

    Attributes:
        rank: the rank that failed, in the iteration in which it failed.
        host: the name of its host.
        remote_traceback: the traceback as text, or an empty string where there is none
            (a killed process leaves none).
    """

    def __init__(self, message: str, *, rank: int, host: str, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        text = f"rank {self.rank} on {self.host}: {self.args[0]}"
        return f"{text}\n{self.remote_traceback.rstrip()}" if self.remote_traceback else text


class LaunchError(OutlastError):
    """A job could not be started."""


class ChaosError(OutlastError):
    """A fault plan is wrong (where and why), or an exception that a plan asked for."""


class EventLogError(OutlastError):
    """An event log cannot be read; names the file and the line."""


class AsyncCallError(OutlastError):
    """A background call failed on some rank; names the call, the rank and the cause."""


class CheckpointError(OutlastError):
    """A checkpoint cannot be written, found or believed."""


class RankShouldRestart(BaseException):
    """Raised in the training function to interrupt it.

    A function that raises it itself asks for a restart. It derives from `BaseException`, so that
    `except Exception` in user code lets it pass.
    """


class RestartAbort(BaseException):
    """Ends the job: this rank leaves with it, and all other ranks end too."""
