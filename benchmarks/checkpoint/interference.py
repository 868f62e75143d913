"""The cost of saves to running training: its steps per second, at several save intervals.

Each segment with saves is paired with an adjacent one without; a ratio is that of a pair. A segment
starts with a save, whose background work runs during the segment: the time that it takes from later
steps is included. If every step saves, two steps run before the clock starts, since the first save
waits for no earlier one. torch.save has no background work: the training waits until it is durable.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.limits import settle
from benchmarks.checkpoint.saves import disk_folder, in_ranks
from benchmarks.checkpoint.training_state import Size, Training
from benchmarks.checkpoint.ways import Way, chosen, make

__all__ = ["measure"]

Rates = dict[str, dict[str, list[list[float]]]]


def measure(
    size: Size,
    steps: dict[int, int],
    rounds: int,
    *,
    names: Sequence[str],
    quick: bool = False,
) -> dict[str, Any]:
    """Steps per second, for each interval and way: with saves, and in the adjacent segment.

    Args:
        size: the size of the model.
        steps: the number of steps of a segment, for each save interval.
        rounds: how often all segments are repeated.
        names: the ways to save; those of libraries that are not installed are left out.
    """
    print(f"slowdown: a training that saves, {rounds} rounds", flush=True)
    found: dict[str, Any] = in_ranks(
        "slowdown", 1, lambda _: _train(size, steps, rounds, chosen(names, quick))
    )[0]
    return found


def _train(
    size: Size, steps: dict[int, int], rounds: int, all_names: Sequence[str]
) -> dict[str, Any]:
    job = Training(size)
    rates: Rates = {str(every): {name: [] for name in all_names} for every in steps}
    with disk_folder() as folder:
        for number in range(rounds):
            for every, count in steps.items():
                # A 0 B, C 0 D, ...: each is adjacent to a segment without saves.
                names = all_names if number % 2 == 0 else all_names[::-1]
                for at in range(0, len(names), 2):
                    before = _with_saves(names[at], folder, job, every, count)
                    without = _segment(job, None, 0, count, waits=False)
                    rates[str(every)][names[at]].append([before, without])
                    for name in names[at + 1 : at + 2]:
                        after = _with_saves(name, folder, job, every, count)
                        rates[str(every)][name].append([after, without])
    return {"size_bytes": job.size_bytes, "rates": rates}


def _with_saves(name: str, folder: Path, job: Training, every: int, count: int) -> float:
    way = make(name, folder, job)
    way.save(job.state_dict(), 0)()  # the first save is measured separately
    settle()
    rate = _segment(job, way, every, count, waits=name == "torch.save")
    way.close()
    settle()
    return rate


def _segment(job: Training, way: Way | None, every: int, count: int, *, waits: bool) -> float:
    warm = 2 if every <= 1 else 0
    began = time.perf_counter()
    for number in range(warm + count):
        if number == warm:
            began = time.perf_counter()
        if way is not None and (number < warm or (number - warm) % every == 0):
            wait = way.save(job.state_dict(), number + 1)
            if waits:
                wait()
        job.pass_through()
        if way is not None:
            way.before_step()
        job.optimizer.step()
    return count / (time.perf_counter() - began)
