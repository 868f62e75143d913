"""`Timeouts`: the durations of a `Wrapper`, as one value."""

from __future__ import annotations

import dataclasses
import itertools

from outlast.inprocess.progress.adaptive_timeout import Adaptive
from outlast.system.arguments import Duration, as_timedelta, seconds

__all__ = ["Timeouts"]


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """The durations of a `Wrapper`: each a number of seconds or a `datetime.timedelta`.

    `Wrapper` also takes each of them by its name: `Wrapper(soft_timeout=20)`.

    Attributes:
        soft_timeout: without progress for this long, the function is interrupted on all ranks.
            Executing Python code is progress, and so is waiting for a rank that makes progress. Or
            `Adaptive`: a limit between two pings, whatever the rank does, that follows the pace of
            the job.
        hard_timeout: without progress for this long, the rank's process is terminated.
        ping_timeout: a rank that has pinged counts as hung if it neither pings nor reports a step
            for this long, whatever it does; any other if it waits for others for this long.
        heartbeat_timeout: a rank without a heartbeat for this long counts as missing.
        barrier_timeout: for the barriers, and for connecting to the store.
        completion_timeout: from the return of this rank's function to the return of all.
        termination_grace_time: time between SIGTERM and SIGKILL after the hard timeout.
        monitor_thread_interval: backstop for the monitor thread's waits.
        monitor_process_interval: time between two heartbeats of the monitor process.
        progress_watchdog_interval: time between two automatic progress timestamps.

    Raises:
        TypeError, ValueError: naming the invalid duration, or the two that are in the wrong order.
    """

    soft_timeout: Duration | Adaptive = 60.0
    hard_timeout: Duration = 90.0
    ping_timeout: Duration = 600.0
    heartbeat_timeout: Duration = 30.0
    barrier_timeout: Duration = 120.0
    completion_timeout: Duration = 120.0
    termination_grace_time: Duration = 5.0
    monitor_thread_interval: Duration = 1.0
    monitor_process_interval: Duration = 1.0
    progress_watchdog_interval: Duration = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (name == "soft_timeout" and isinstance(value, Adaptive)):
                object.__setattr__(self, name, as_timedelta(name, value))
        chains = (
            ("soft_timeout", "hard_timeout", "barrier_timeout"),
            ("monitor_process_interval", "heartbeat_timeout", "barrier_timeout"),
            ("monitor_thread_interval", "soft_timeout"),
            ("progress_watchdog_interval", "soft_timeout"),
        )
        bounds = {**vars(self), "soft_timeout": self.soft}
        for small, large in itertools.chain.from_iterable(map(itertools.pairwise, chains)):
            if not seconds(bounds[small]) < seconds(bounds[large]):
                raise ValueError(
                    f"{small} ({bounds[small]}) must be less than {large} ({bounds[large]})"
                )

    @property
    def soft(self) -> Duration:
        """The soft timeout; if it is adaptive, its upper bound."""
        soft = self.soft_timeout
        return soft.initial if isinstance(soft, Adaptive) else soft

    @property
    def least_soft(self) -> Duration:
        """The soft timeout; if it is adaptive, its lower bound."""
        soft = self.soft_timeout
        return soft.floor if isinstance(soft, Adaptive) else soft
