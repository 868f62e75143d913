"""Compares two kinds of short segments that alternate: a ratio per pair, and its 95 % interval."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Sequence

__all__ = ["Share", "growth"]

_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Share:
    """By which share something grows, and the 95 % interval of that (bootstrap over the pairs)."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.2f} % ({100 * self.low:.2f} to {100 * self.high:.2f})"


def growth(plain: Sequence[float], other: Sequence[float]) -> Share:
    """By which share the cost of the segments grows, from `plain` to `other`.

    The interquartile mean of the ratios: as robust as the median against a pair that another
    process has disturbed, with a narrower interval.
    """
    ratios = [math.log(b / a) for a, b in zip(plain, other, strict=True)]
    source = random.Random(0)
    found = sorted(
        math.expm1(_middle(source.choices(ratios, k=len(ratios)))) for _ in range(_RESAMPLES)
    )
    return Share(
        math.expm1(_middle(ratios)),
        found[int(0.025 * _RESAMPLES)],
        found[int(0.975 * _RESAMPLES)],
    )


def _middle(values: Sequence[float]) -> float:
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])
