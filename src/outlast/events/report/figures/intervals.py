"""Sets of moments as sorted intervals that do not overlap: union, intersection, difference."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


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
    ends = [end for _, end in other]
    starts = [start for start, _ in other]
    gaps = zip([float("-inf"), *ends], [*starts, float("inf")], strict=True)
    return intersection(one, list(gaps))


def length(intervals: Iterable[Interval]) -> float:
    """The total length, in seconds."""
    return sum(end - start for start, end in intervals)
