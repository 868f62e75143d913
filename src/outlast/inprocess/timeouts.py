"""`Timeouts`: the durations of a `Wrapper`, as one value."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import itertools

from outlast.system.arguments import Duration, as_timedelta, seconds

__all__ = ["Timeouts"]


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """A soft timeout that follows the gaps between pings; pass it as `soft_timeout=`.

    It learns from the gaps as TCP learns its retransmission timeout from round-trip times (RFC
    6298). From a smoothed mean and a smoothed mean deviation, the limit is

        mean + deviations * deviation, but at least factor * the longest recent gap, and `floor`.

    The hard timeout is ten times the limit, and at least five seconds. Phases known to be long are
    declared (`CallWrapper.long_phase`); the limit does not apply to them, and nothing is learned
    from their duration.

    Attributes:
        initial: the soft timeout until enough gaps are known, and in a declared long phase
            that has no limit.
        floor: the lower bound of the limit. A limit below a second counts while no rank works.
        factor: the limit is at least this many times the longest recent gap.
        deviations: the limit is this many mean deviations above the mean gap.
        warmup: the number of gaps to observe first. The first steps of a job are its slowest.
    """

    initial: Duration = datetime.timedelta(seconds=60)
    floor: Duration = datetime.timedelta(seconds=1)
    factor: float = 4.0
    deviations: float = 8.0
    warmup: int = 10

    def __post_init__(self) -> None:
        for name in ("initial", "floor"):
            value = as_timedelta(f"Adaptive {name}", getattr(self, name))
            object.__setattr__(self, name, value)
        if seconds(self.floor) > seconds(self.initial):
            raise ValueError(f"Adaptive floor={self.floor} must not exceed initial={self.initial}")
        if self.factor < 1 or self.deviations < 0 or self.warmup < 1:
            raise ValueError(
                f"Adaptive needs factor >= 1, deviations >= 0, warmup >= 1, not factor="
                f"{self.factor}, deviations={self.deviations}, warmup={self.warmup}"
            )


class GapEstimator:
    """Estimates the limit, in seconds, from the gaps seen so far."""

    # Weights of RFC 6298, section 2.
    _MEAN_WEIGHT = 1 / 8
    _DEVIATION_WEIGHT = 1 / 4
    _RECENT = 64

    def __init__(self, settings: Adaptive) -> None:
        self.settings = settings
        self._seen = 0
        self._mean = 0.0
        self._deviation = 0.0
        self._recent: collections.deque[float] = collections.deque(maxlen=self._RECENT)

    def observe(self, gap: float) -> None:
        """Learns from the time between two pings, in seconds."""
        if self._seen == 0:
            self._mean, self._deviation = gap, gap / 2
        else:
            error = abs(gap - self._mean)
            self._deviation += self._DEVIATION_WEIGHT * (error - self._deviation)
            self._mean += self._MEAN_WEIGHT * (gap - self._mean)
        self._seen += 1
        self._recent.append(gap)

    @property
    def limit(self) -> float:
        """The soft timeout in force, in seconds."""
        initial = seconds(self.settings.initial)
        if self._seen < self.settings.warmup:
            return initial
        learned = self._mean + self.settings.deviations * self._deviation
        learned = max(learned, self.settings.factor * max(self._recent))
        return min(initial, max(seconds(self.settings.floor), learned))


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
        last_call_wait: accepted, and never waited for: a fault that is reported late, of the same
            iteration, belongs to the same restart.
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
    last_call_wait: Duration = 1.0
    termination_grace_time: Duration = 5.0
    monitor_thread_interval: Duration = 1.0
    monitor_process_interval: Duration = 1.0
    progress_watchdog_interval: Duration = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (name == "soft_timeout" and isinstance(value, Adaptive)):
                checked = as_timedelta(name, value, allow_zero=name == "last_call_wait")
                object.__setattr__(self, name, checked)
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

    def in_seconds(self) -> Durations:
        """The same for all parts of a rank, in seconds."""
        soft = self.soft_timeout
        return Durations(
            soft=seconds(self.soft),
            least_soft=seconds(soft.floor if isinstance(soft, Adaptive) else soft),
            hard=seconds(self.hard_timeout),
            ping=seconds(self.ping_timeout),
            heartbeat=seconds(self.heartbeat_timeout),
            barrier=seconds(self.barrier_timeout),
            completion=seconds(self.completion_timeout),
            grace=seconds(self.termination_grace_time),
            backstop=max(1.0, seconds(self.monitor_thread_interval)),
            monitor_interval=seconds(self.monitor_process_interval),
            progress_interval=seconds(self.progress_watchdog_interval),
        )


@dataclasses.dataclass(frozen=True)
class Durations:
    """`Timeouts` in seconds: what the state machine, the monitor process and the threads of a rank
    go by. The monitor process applies some of them as its rank's activity requires
    (`monitor.timeouts.limits_in_force`).
    """

    soft: float  # of an adaptive one, the upper bound
    least_soft: float  # of an adaptive one, the lower bound
    hard: float
    ping: float
    heartbeat: float  # a member without a heartbeat for this long counts as lost
    barrier: float  # for the barriers between iterations, and to reach the store
    completion: float  # from the return of this rank to the return of all
    grace: float  # between SIGTERM and SIGKILL
    backstop: float  # a waiting member checks by itself this often (the pause doubles)
    monitor_interval: float  # between two heartbeats
    progress_interval: float  # between two timestamps of progress
    hold: float = 0.0  # a restart is held for replacements for this long at most

    @property
    def computing(self) -> float:
        """`completion` while one of the other ranks is at work."""
        return max(self.completion, self.ping)
