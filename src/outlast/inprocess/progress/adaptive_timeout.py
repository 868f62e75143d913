"""The adaptive soft timeout, which follows the pace of the job.

`Adaptive` learns from the gaps between pings, as TCP learns its retransmission timeout from
round-trip times (RFC 6298). From a smoothed mean and a smoothed mean deviation, the limit is

    mean + deviations * deviation, but at least factor * the longest recent gap, and `floor`.

The hard timeout is ten times the limit, and at least five seconds. So a hang is detected within a
few step times. Until `warmup` gaps are known, the limit is `initial`. Phases known to be long are
declared (`CallWrapper.long_phase`); the limit does not apply to them, and nothing is learned from
their duration.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime

from outlast.system.arguments import Duration, as_timedelta, seconds


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """A soft timeout that follows the gaps between pings; pass it as `soft_timeout=`.

    Attributes:
        initial: the soft timeout until enough gaps are known, and in a declared long phase
            that has no limit.
        floor: the lower bound of the limit.
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
