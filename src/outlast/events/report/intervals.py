"""Sets of moments, as sorted intervals that do not overlap; and the stretches of training."""

from __future__ import annotations

from collections.abc import Iterable

from outlast.events.event import Record

Interval = tuple[float, float]
FOREVER = float("inf")


class Stretch(Record):
    """One iteration on one host: the time in which all its active ranks were in the function."""

    start: float
    end: float
    size: float = 1.0  # the share of ranks that were active, of the largest number so far
    hung_from: float = FOREVER  # the last progress of hung ranks; infinity if no rank hung
    host_lost: bool = False  # whether all ranks of the host were lost at its end
    # those of the function; without `Wrapper`, the number of the round
    call: int = 0
    iteration: int = 0

    @property
    def hang(self) -> Interval:
        """When hung ranks made no progress in it."""
        return max(self.start, self.hung_from), self.end


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments in any of the intervals, which may overlap and come in any order."""
    merged: list[Interval] = []
    for start, end in sorted(each for each in intervals if each[0] < each[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def intersection(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """The moments in both sets."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """The moments in `one` and not in `other`."""
    starts, ends = [start for start, _ in other], [end for _, end in other]
    gaps = zip([-FOREVER, *ends], [*starts, FOREVER], strict=True)
    return intersection(one, list(gaps))


def length(intervals: Iterable[Interval]) -> float:
    """The total length, in seconds."""
    return sum(end - start for start, end in intervals)
