"""`python -m benchmarks.limits.measure NAME [--quick]`: one measurement, in the process of its own
that `benchmarks.limits.run` starts with the code that is to be measured. Prints its figures.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.checkpoint import first_save, many_tensors, saves
from benchmarks.checkpoint.training_state import FULL, QUICK, SHARE
from benchmarks.inprocess import hang, many_ranks
from benchmarks.inprocess.floor import floor
from benchmarks.rollback import useful_step
from benchmarks.rollback.limits import limits
from benchmarks.rollback.step_cost import step_cost

__all__ = ["MEASUREMENTS", "measure"]

Figures = dict[str, float]

_FLOOR_MS = 100  # of `Adaptive`


def _useful(
    mib: int, ranks: int, kept: bool, kind: str, faults: int, *, bare: bool = False
) -> Callable[[bool], Figures]:
    def measure(quick: bool) -> Figures:
        each = useful_step.measure(mib, ranks, kept, kind, 2 if quick else faults, bare=bare)
        parts = {
            name: statistics.median(fault["parts"][name] for fault in each)
            for name in useful_step.PARTS
        }
        whole = {
            name: statistics.median(fault[name] for fault in each) for name in ("total", "step")
        }
        copies = limits(mib << 20, 3)
        return {**parts, **whole, **{name: copies[name] for name in ("socket", "neighbor")}}

    return measure


def _step(name: str, seconds: float) -> Callable[[bool], Figures]:
    """The time that live state adds to a step; and its processor time, of each rank, and of the
    training thread within `job.step()`.
    """

    def measure(quick: bool) -> Figures:
        found = step_cost(name, 1.0 if quick else seconds)
        pairs = list(zip(found["plain"], found["live"], strict=True))
        return {
            "plain": statistics.median(plain[0] for plain, _ in pairs),
            "time": statistics.median(live[0] - plain[0] for plain, live in pairs),
            "pass": found["counters"],
            "looks": found["looks"],
            "processor": statistics.median((live[1] - plain[1]) / 2 for plain, live in pairs),
            "thread": statistics.median(live[2] - plain[2] for plain, live in pairs),
        }

    return measure


def _saves(ranks: int) -> Callable[[bool], Figures]:
    def measure(quick: bool) -> Figures:
        size = QUICK if quick else FULL if ranks == 1 else SHARE
        found = saves.measure(size, ranks, 1 if quick else 5, quick=quick, peers=False)
        return _medians(found["seconds"])

    return measure


def _first(quick: bool) -> Figures:
    size, rounds = (QUICK, 1) if quick else (FULL, 3)
    return _medians(first_save.measure(size, rounds, quick=quick, peers=False))


def _medians(seconds: dict[str, saves.Timed]) -> Figures:
    return {
        f"{name}: {what}": statistics.median(times)
        for name, timed in seconds.items()
        for what, times in timed.items()
    }


def _many(quick: bool) -> Figures:
    """On the training thread: its time."""
    found = many_tensors.measure(40 if quick else 10_000)
    return {
        name: each[min(1, len(each) - 1)] for name, each in found.items() if isinstance(each, list)
    }


def _restart(ranks: int) -> Callable[[bool], Figures]:
    def measure(quick: bool) -> Figures:
        found = many_ranks.restarts(ranks, 1 if quick else 3)
        least = statistics.median(floor(ranks, 1 if quick else 5))
        seconds = statistics.median(found["seconds"])
        return {"seconds": seconds, "model": found["predicted"], "least": least}

    return measure


def _hang(quick: bool) -> Figures:
    found = hang.measure(_FLOOR_MS, 2 if quick else 12)
    same = hang.measure(_FLOOR_MS, 2 if quick else 12, raises=True)
    figures = {name: statistics.median(found[name]) for name in ("detection", "recovery")}
    return {**figures, "exception": statistics.median(same["recovery"])}


MEASUREMENTS: dict[str, Callable[[bool], Figures]] = {
    "exception, 1 MiB": _useful(1, 2, False, "exception", 12),
    "exception, 1 MiB, torch alone": _useful(1, 2, False, "exception", 12, bare=True),
    "exception, 1 MiB, 4 ranks, torch alone": _useful(1, 4, False, "exception", 12, bare=True),
    "SIGKILL, 1 MiB, torch alone": _useful(1, 2, False, "sigkill", 6, bare=True),
    "exception, 1 MiB, kept": _useful(1, 2, True, "exception", 12),
    "exception, 1 MiB, 4 ranks": _useful(1, 4, False, "exception", 12),
    "SIGKILL, 1 MiB": _useful(1, 2, False, "sigkill", 6),
    "SIGKILL, 256 MiB, kept": _useful(256, 2, True, "sigkill", 4),
    "SIGKILL, 1 GiB, kept": _useful(1024, 2, True, "sigkill", 3),
    "step, 10 tensors": _step("10 tensors", 10),
    "step, 1,000 tensors": _step("1,000 tensors", 15),
    "step, 10,000 tensors": _step("10,000 tensors", 20),
    "saves, 1 rank": _saves(1),
    "saves, 4 ranks": _saves(4),
    "first save": _first,
    "10,000 tensors": _many,
    "restart, 64 ranks": _restart(64),
    "restart, 128 ranks": _restart(128),
    "hang": _hang,
}
"""Each gives figures by name: seconds, but for ratios and numbers."""


def measure(name: str, quick: bool) -> Figures:
    """The figures of one measurement."""
    return MEASUREMENTS[name](quick)


if __name__ == "__main__":
    found: Any = measure(sys.argv[1], "--quick" in sys.argv[2:])
    print(json.dumps(found), flush=True)
