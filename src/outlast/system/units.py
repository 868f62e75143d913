"""Durations, sizes and lists as text, the same in every message and table."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

_SIZES = ("kB", "MB", "GB", "TB", "PB")


def duration_text(seconds: float) -> str:
    """A duration with its unit: 850 µs, 12.3 ms, 4.56 s, 3 min 20 s, 5 h 12 min, 3 d 4 h."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    minutes = whole // 60
    if minutes < 2880:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def age_text(seconds: float) -> str:
    """How long ago, in its largest unit: 12 s, 3 min, 5 h, 2 d. A clock may be a little behind."""
    whole = max(0, int(seconds))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if whole >= 2 * length or (whole >= length and unit == "min"):
            return f"{whole // length} {unit}"
    return f"{whole} s"


def size_text(size_bytes: int) -> str:
    """A size with its decimal unit: 8 bytes, 2.6 kB, 25.2 MB."""
    if size_bytes < 1000:
        return f"{size_bytes} byte{'' if size_bytes == 1 else 's'}"
    size, power = size_bytes / 1000, 0
    while size >= 999.95 and power < len(_SIZES) - 1:  # 999.96 would be printed as 1000.0
        size, power = size / 1000, power + 1
    return f"{size:.1f} {_SIZES[power]}"


def listed(names: Sequence[object], most: int = 4) -> str:
    """The first names, and how many more: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def rank_names(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 1 and 3 more`."""
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks, 8)}"


def late_text(what: str, missing: Sequence[int], timeout_s: float, rank: int) -> str:
    """The text of an error of `rank`, which has waited for the missing ranks."""
    limit = datetime.timedelta(seconds=timeout_s)
    return f"{what}: {rank_names(missing)} did not make the call within {limit}, rank {rank} waited"
