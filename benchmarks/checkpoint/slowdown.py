"""The slowdown of a training by the interval between its checkpoints, as PCcheck's paper shows it
(Strati et al., ASPLOS 2025): saves of each system in the same training, at six intervals.

A slowdown is the time of a segment with saves, by that of an adjacent one without: see
`interference`.
"""

from __future__ import annotations

from typing import Any

from benchmarks.checkpoint import interference
from benchmarks.checkpoint.training_state import LARGE, QUICK, SHARE
from benchmarks.lib.sheets import Sheet, median, ms

__all__ = ["run", "sheets"]

_OURS = ("ours, overlapped", "ours, eager")
_OTHERS = (
    "torch.save",
    "async_save, cached stager",
    "async_save, cached stager, a process",
    "torch-checkpointing",
    "torch-checkpointing, staged beside",
    "lm-resiliency",
)
# The steps of a segment, for each number of steps between two saves.
_STEPS = {1: 16, 5: 20, 10: 40, 25: 50, 50: 50, 100: 100}
_QUICK_STEPS = {1: 2, 10: 10}
_GOAL = 0.5
_NOISE = 0.01


def run(quick: bool, large: bool = False) -> dict[str, Any]:
    """Segments at each interval, with a state of 192 MiB, or of 1.1 GB if `large`."""
    size = QUICK if quick else LARGE if large else SHARE
    steps, rounds = (_QUICK_STEPS, 1) if quick else (_STEPS, 2)
    return interference.measure(size, steps, rounds, names=(*_OURS, *_OTHERS), quick=quick)


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """Two tables: a row for each way, a column for each interval."""
    rates = data["rates"]
    slowdowns: dict[str, dict[str, float]] = {}
    a_save: dict[str, list[str]] = {}
    for every, found in rates.items():
        for name, pairs in found.items():
            value = median([without / saving for saving, without in pairs])
            slowdowns.setdefault(name, {})[every] = value or 0.0
            longer = median([1 / saving - 1 / without for saving, without in pairs]) or 0.0
            a_save.setdefault(name, []).append(ms(int(every) * longer))
    rows = [
        (name, *(f"{value:.3f}" for value in by_interval.values()), *_verdict(name, slowdowns))
        for name, by_interval in slowdowns.items()
    ]
    what = f"training that saves {data['size_bytes'] / 2**20:,.0f} MiB, one process"
    intervals = tuple(f"every {every}" for every in rates)
    return [
        Sheet(
            f"Slowdown of a {what}",
            ("way", *intervals, "goal", "met"),
            rows,
            "Time with saves by time without, the median of the pairs of segments. The goal: at "
            "every interval, at most half of the time that the best other way loses. Intervals at "
            f"which that loses less than {_NOISE:.0%} are within the noise, and not compared. "
            "torch.save trains on once the file is durable.",
        ),
        Sheet(
            f"By how many ms a save lengthens a {what}",
            ("way", *intervals),
            [(name, *each) for name, each in a_save.items()],
            "Of the same segments. With a save at every step, the disk decides: each save waits "
            "until the one before is durable.",
        ),
    ]


def _verdict(name: str, slowdowns: dict[str, dict[str, float]]) -> tuple[str, str]:
    """The goal of a row, and whether it is met, or at which intervals it is not."""
    if name not in _OURS:
        return "-", "-"
    missed, compared = [], 0
    for every, slowdown in slowdowns[name].items():
        best = min(slowdowns[other][every] for other in slowdowns if other not in _OURS) - 1
        if best >= _NOISE:
            compared += 1
            if slowdown - 1 > _GOAL * best:
                missed.append(every)
    met = f"no: every {', '.join(missed)}" if missed else "yes" if compared else "-"
    return f"{_GOAL:g} x the best other", met
