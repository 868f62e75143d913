"""The whole exception tree of `outlast`.

Failures that the caller did not cause derive from `OutlastError`. Misuse of `outlast` raises the
built-in `ValueError` and `TypeError`, which name the argument. Control flow that must pass through
user code derives from `BaseException`, so that `except Exception` does not catch it::

    Exception
    +-- OutlastError                     something failed that the caller did not cause
        +-- RestartError                 this rank cannot continue the restart in place
        |   +-- HealthCheckError         a health check excludes this rank
        |   +-- InternalError            a bug in outlast: please report it
        |   +-- RankTimeout              a wait for other ranks exceeded its timeout
        |   +-- StoreError               the store cannot be reached; names host and port
        |   +-- RankLostError            the other ranks continued without this one
        |   +-- RankDiscarded            the rank assignment left this rank out
        |   +-- FaultCounterExceeded     this rank had too many faults
        +-- RankFault                    the first cause of a restart, as reported by its rank
        +-- LaunchError                  a job could not be started
        |   +-- HostUnfit                this host must not run ranks of the job
        +-- ChaosError                   an invalid fault plan, or a planned exception
        +-- EventLogError                an event log cannot be read
        +-- ReplicasDiffer               replicas differ, and no majority says which is wrong
        +-- NonFinite                    the loss or a parameter is not a finite number
        |   +-- SkipBatches              the job goes back, and leaves out the batches since
        +-- AsyncCallError               a background call failed on some rank
        +-- CheckpointError              a checkpoint cannot be written, found or verified
            +-- CheckpointMismatch       a valid checkpoint does not fit the state to restore
            +-- CheckpointUnsavable      the state to save contains what cannot be saved
            +-- CheckpointReadError      a checkpoint cannot be read now, and may be intact
            +-- CheckpointTimeout        a wait for storage or other ranks exceeded its timeout
            +-- TornSnapshot             the program has written to what was being copied
            +-- UnevenRanks              the ranks have not made the same steps
            +-- SaveCancelled            a save was dropped for all ranks; a CancelledError too
            +-- FolderInUse              another job saves into the same folder
            +-- FolderUnusable           nothing can be saved in the folder: no access, read-only
    BaseException
    +-- RankShouldRestart                raised in the training function to interrupt it
    +-- RankExcluded                     this rank's replica is wrong: it leaves the job
    +-- RankMoved                        this rank leaves in order; exit code 0 (a `SystemExit`)
    +-- RestartAbort                     ends the job on every rank
        +-- UnrecoverableFault           restarts do not help; exit code 93 (also a `SystemExit`)

An error about a rank names the rank, its host and the first cause. `RankTimeout` and
`CheckpointTimeout` are also Python's own `TimeoutError`. An object that was closed, such as a
`Checkpointer` or an `AsyncCallsQueue`, raises `ValueError` when it is used, as a closed file does.
An error class with `permanent = True` ends a job with `inprocess.Wrapper` at once: every restart
would raise it again.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import ClassVar

NO_RESTART = 93
"""The exit code of a job that a restart would not help: do not requeue it."""


class OutlastError(Exception):
    """The base of all failures that the caller did not cause; misuse is a built-in error.

    Attributes:
        permanent: whether every restart would end with the same error.
        of_another_rank: whether another rank has failed, which raises the same error.
    """

    permanent: ClassVar[bool] = False
    of_another_rank = False


class RestartError(OutlastError):
    """This rank cannot continue the restart in place."""


class HealthCheckError(RestartError):
    """A health check found that this rank must not take part in the job."""


class InternalError(RestartError):
    """A guarantee of `outlast` was broken. This is a bug: please report it."""


class RankTimeout(RestartError, TimeoutError):
    """A wait for other ranks exceeded its timeout."""


class StoreError(RestartError):
    """The store through which the ranks communicate cannot be reached; names its host and port."""


class RankLostError(RestartError):
    """The other ranks considered this one lost, and continued without it."""


class RankDiscarded(RestartError):
    """The rank assignment left this (healthy) rank out of the next iteration."""


class FaultCounterExceeded(RestartError):
    """This rank had more faults than `FaultCounter` allows."""


class RankFault(OutlastError):
    """The first cause of a restart, as its rank reported it; the `__cause__` of later errors.

    Attributes:
        rank: the rank that failed, as numbered in the iteration of the fault.
        host: the name of its host.
        remote_traceback: the traceback as text; empty if there is none (a killed process
            leaves none).
    """

    def __init__(self, message: str, *, rank: int, host: str, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank, self.host, self.remote_traceback = rank, host, remote_traceback

    def __str__(self) -> str:
        text = f"rank {self.rank} on {self.host}: {self.args[0]}"
        return f"{text}\n{self.remote_traceback.rstrip()}" if self.remote_traceback else text


class LaunchError(OutlastError):
    """A job could not be started."""


class HostUnfit(LaunchError):
    """This host must not run ranks: it has failed a health check, its ranks had too many faults, or
    a process of it cannot be ended; names the host, the reason, and what to do.
    """


class ChaosError(OutlastError):
    """An invalid fault plan (names where and why), or an exception that a plan requested."""


class EventLogError(OutlastError):
    """An event log cannot be read; names the file and the line."""


class ReplicasDiffer(OutlastError):
    """Parameters differ between ranks that must hold the same ones, and no majority says which rank
    is wrong; names the ranks, their hosts and the parameters.
    """


class NonFinite(OutlastError):
    """The loss or a parameter is infinite or NaN; names the parameter, the first rank and step, and
    the newest checkpoint whose parameters are finite.
    """

    permanent = True


class SkipBatches(NonFinite):
    """With `FiniteCheck(on_non_finite="skip")`: the job restarts, goes back to the newest
    checkpoint whose parameters are finite, and leaves out the batches since; names both. A program
    that is not restarted by `inprocess.Wrapper` or a launcher does so when it is started again.
    """

    permanent = False


class AsyncCallError(OutlastError):
    """A background call failed on some rank; names the call, the rank and the cause."""


class CheckpointError(OutlastError):
    """A checkpoint cannot be written, found or verified."""


class CheckpointMismatch(CheckpointError):
    """A valid checkpoint does not fit the state to restore; names what differs."""

    permanent = True


class CheckpointUnsavable(CheckpointError):
    """The state to save contains what a checkpoint cannot hold, such as a function; names it."""

    permanent = True


class CheckpointReadError(CheckpointError):
    """A checkpoint cannot be read now, because of the disk, the network or this process: an I/O
    error, a permission, too many open files. It may be intact, so no older one is restored instead;
    names the rank, the host, the file and the error.
    """


class CheckpointTimeout(CheckpointError, TimeoutError):
    """A wait of a save exceeded the checkpointer's `timeout`; names the folder and what was waited
    for, such as a disk that does not respond.
    """


class TornSnapshot(CheckpointError):
    """A save with `overlap` has failed, because the program has written to tensors, before the
    optimizer's step, that were being copied; names the first of them. Later saves copy at once.
    """


class UnevenRanks(CheckpointError):
    """The ranks meet, at a save or at the end of a `Job`, and have not made the same steps; names
    the steps of each, and what to do. What they have is no one state: it is not saved.
    """

    permanent = True


class SaveCancelled(CheckpointError, CancelledError):
    """A save was dropped for all ranks before it was committed: by `abort`, a restart in place, or
    a `close` whose time ran out.
    """


class FolderInUse(CheckpointError):
    """Another job saves into the same folder; names the lock holder.

    Attributes:
        another_group: whether that is the same run, in a group of hosts that this one has not met.
    """

    def __init__(self, message: str, *, another_group: bool = False) -> None:
        super().__init__(message)
        self.another_group = another_group


class FolderUnusable(CheckpointError):
    """Checkpoints cannot be saved in the folder: it cannot be created or written to, or is none;
    names it, the cause, and what to do.
    """

    permanent = True


class RankShouldRestart(BaseException):
    """Raised in the training function to interrupt it.

    The function may raise it to request a restart. It derives from `BaseException`, so that `except
    Exception` in user code does not catch it.
    """


class RankExcluded(BaseException):
    """This rank's parameters differ from those of the other replicas: it leaves the job, and the
    others restart without it, or with its replacement. Names the ranks, their hosts and the
    parameters.
    """


class RankMoved(SystemExit):
    """Raised by `Job.step` on a rank that leaves the job in order: the process exits with code 0.

    Attributes:
        reason: why it leaves.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason


class RestartAbort(BaseException):
    """Ends the job: this rank raises it, and all other ranks end too."""


class UnrecoverableFault(RestartAbort, SystemExit):
    """Ends the job on every rank: its first cause came back, or no restart can fix it.

    Its `__cause__` is the `RankFault` of the first cause. It is a `SystemExit` with code 93: a
    process that does not catch it exits with 93 under every launcher. The rank of the first cause
    logs its traceback; the interpreter prints nothing.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = NO_RESTART


# See `system.lazy_exports`.
vars()["__all__"] = [n for n, e in [*vars().items()] if getattr(e, "__module__", "") == __name__]
