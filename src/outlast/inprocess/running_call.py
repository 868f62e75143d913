"""The running call of a wrapped function, as other packages of `outlast` see it.

It outlives the iterations: what is asked of it holds for the rest of the call, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from outlast.coordination.records import StopRecord


class RunningCall(Protocol):
    """One call of a wrapped function, on this rank."""

    @property
    def rank(self) -> int:
        """The rank of this process, in the present or the last iteration."""

    @property
    def stop(self) -> StopRecord | None:
        """The request to stop that was known when the present iteration was decided: the same on
        all ranks. This iteration is then the last one.
        """

    @property
    def terminated(self) -> bool:
        """Whether the hard timeout is over, so that the monitor process ends this process: first by
        SIGTERM, which is no request to stop the job then.
        """

    @property
    def fault_came_back(self) -> bool:
        """Whether the last iteration ended with a fault equal to one before it, without progress in
        between. A process that has joined since does not know of it.
        """

    def request_stop(self, reason: str, exit_code: int) -> None:
        """Records a request to stop: from the next restart on, every rank knows of it.

        The first request counts. Any thread may call this.

        Raises:
            StoreError: if the store cannot be reached.
        """

    def saving_for_stop(self, limit_s: float) -> None:
        """Tells the launcher that the last save has begun, and how long it may take."""

    def finish_stop(self, done: str) -> None:
        """Records that the stop has been carried out; `done` says what was saved. Every rank that
        has not left by itself then leaves with the exit code of the request.
        """

    def require_ranks(self, min_ranks: int | None) -> None:
        """Requires a number of active ranks for every further iteration; `None`: as many as at the
        start, unless the rank assignment has `AwaitReplacements`.

        Raises:
            RestartAbort: here if there are fewer already, or at the restart that leaves fewer.
        """

    def long_phase(self, limit_s: float | None) -> AbstractContextManager[None]:
        """Declares a phase without pings, as `CallWrapper.long_phase`."""

    def at_end(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when the call ends on this rank, in any way."""


_current: RunningCall | None = None


def running_call() -> RunningCall | None:
    """The call that runs in this process; `None` outside of wrapped functions."""
    return _current


def long_phase(limit_s: float | None) -> AbstractContextManager[None]:
    """`RunningCall.long_phase` in a wrapped function; does nothing outside of one."""
    return nullcontext() if _current is None else _current.long_phase(limit_s)


def set_running_call(call: RunningCall | None) -> None:
    """Sets the result of `running_call`; only the session of a call does."""
    global _current
    _current = call
