"""What saving costs a training that goes on: its steps a second, at several intervals of saves.

Each segment of the training with saves stands next to one without; a ratio is of such a pair. A
segment begins with a save, and what a save leaves behind runs on in it: the time a save takes from
the steps after it is in the figure, wherever it shows. When every step saves, two of them go before
the clock starts: the first save waits for none.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.limits import settle
from benchmarks.checkpoint.saves import disk_folder, in_ranks
from benchmarks.checkpoint.training_state import Job, Size
from benchmarks.checkpoint.ways import OURS, Way, chosen, make

__all__ = ["NAMES", "measure"]

NAMES = (
    *OURS,
    "dcp.async_save",
    "async_save, cached stager",
    "async_save, cached stager, staged beside",
    "async_save, cached stager, a process",
)
Rates = dict[str, dict[str, list[list[float]]]]


def measure(
    size: Size, steps: dict[int, int], rounds: int, *, quick: bool = False
) -> dict[str, Any]:
    """Steps a second, for each interval and way: with saves, and of the segment beside it.

    Args:
        size: of the model.
        steps: of a segment, for each interval of saves.
        rounds: of all segments.
    """
    print(f"checkpoint: a training that saves, {rounds} rounds", flush=True)
    found: dict[str, Any] = in_ranks(
        "checkpoint-train", 1, lambda _: _train(size, steps, rounds, quick)
    )[0]
    return found


def _train(size: Size, steps: dict[int, int], rounds: int, quick: bool) -> dict[str, Any]:
    job = Job(size)
    all_names = chosen(NAMES, quick)
    rates: Rates = {str(every): {name: [] for name in all_names} for every in steps}
    with disk_folder() as folder:
        for number in range(rounds):
            for every, count in steps.items():
                # A B 0 C D 0 ...: each has a segment without saves at its side.
                names = all_names if number % 2 == 0 else all_names[::-1]
                for at in range(0, len(names), 2):
                    before = _with_saves(names[at], folder, job, every, count)
                    without = _segment(job, None, 0, count)
                    rates[str(every)][names[at]].append([before, without])
                    for name in names[at + 1 : at + 2]:
                        after = _with_saves(name, folder, job, every, count)
                        rates[str(every)][name].append([after, without])
    return {"size_bytes": job.size_bytes, "rates": rates}


def _with_saves(name: str, folder: Path, job: Job, every: int, count: int) -> float:
    way = make(name, folder, job)
    way.save(job.state_dict(), 0)()  # its first save is a figure of its own
    settle()
    rate = _segment(job, way, every, count)
    way.close()
    settle()
    return rate


def _segment(job: Job, way: Way | None, every: int, count: int) -> float:
    warm = 2 if every <= 1 else 0
    began = time.perf_counter()
    for number in range(warm + count):
        if number == warm:
            began = time.perf_counter()
        if way is not None and (number < warm or (number - warm) % every == 0):
            way.save(job.state_dict(), number + 1)
        job.pass_through()
        if way is not None:
            way.before_step()
        job.optimizer.step()
    return count / (time.perf_counter() - began)
