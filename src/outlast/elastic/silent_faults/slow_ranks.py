"""Judges from the ranks' times of a step which of them are slow, window after window."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Sequence

_DEVIATIONS = 5.0
_SCALE = 1.4826  # of the median absolute deviation: a standard deviation of normal values
_LEAST_S = 0.0005  # a smaller difference is of the scheduler, not of the rank


@dataclasses.dataclass(frozen=True)
class SlowRank:
    """A rank that has become a straggler; the fields of `StragglerFound`."""

    rank: int
    host: str
    step: int
    seconds: float
    typical_seconds: float
    windows: int


class SlowRanks:
    """Judges one window after the other; keeps how many in a row each rank was slow."""

    def __init__(self, factor: float, windows: int) -> None:
        self._factor = factor
        self._windows = windows
        self._in_a_row: Counter[int] = Counter()

    def __call__(self, texts: Sequence[str]) -> str:
        """The new stragglers, as `decode` reads them; `texts` are the records of the ranks."""
        records = [json.loads(text) for text in texts]
        medians = {
            rank: float(record["median"])
            for rank, record in enumerate(records)
            if record["median"] is not None
        }
        found = []
        for rank, seconds in medians.items():
            typical = _typical(rank, medians)
            if typical is None or not self._is_slow(seconds, *typical):
                self._in_a_row.pop(rank, None)
                continue
            self._in_a_row[rank] += 1
            if self._in_a_row[rank] == self._windows:
                record = records[rank]
                found.append(
                    SlowRank(
                        rank, record["host"], record["step"], seconds, typical[0], self._windows
                    )
                )
        return json.dumps([dataclasses.asdict(each) for each in found])

    @staticmethod
    def decode(text: str) -> list[SlowRank]:
        """The inverse of the encoding of a result."""
        return [SlowRank(**each) for each in json.loads(text)]

    def _is_slow(self, seconds: float, typical: float, spread: float) -> bool:
        above = seconds - typical
        return (
            seconds > self._factor * typical
            and above > _DEVIATIONS * _SCALE * spread
            and above > _LEAST_S
        )


def _typical(rank: int, medians: dict[int, float]) -> tuple[float, float] | None:
    """The median of the other ranks, and the median absolute deviation from it."""
    others = [seconds for other, seconds in medians.items() if other != rank]
    if not others:
        return None
    center = statistics.median(others)
    return center, statistics.median(abs(seconds - center) for seconds in others)
