"""Whether recycled files pay off: saves and restores with and without them.

A save writes over the files of the checkpoint that was removed last. Without that, it creates files
and the old ones are removed. Both variants take turns in one process, in a different order each
round.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.checkpoint.limits import settle
from benchmarks.checkpoint.saves import StepTimer, Timed, disk_folder, in_ranks, one_save
from benchmarks.checkpoint.training_state import FULL, QUICK, Size, Training
from benchmarks.checkpoint.ways import make
from benchmarks.lib.sheets import Sheet, median, ms
from outlast.async_checkpoint.writer import client
from outlast.system.background_process import start_process

__all__ = ["run", "sheets"]

_WITH = "with recycled files"
_VARIANTS = (_WITH, "without recycled files")
_WAYS = ("ours, eager", "ours, overlapped")
_ROOT = Path(__file__).parents[2]


def run(quick: bool) -> dict[str, Any]:
    """Seconds of each variant in each round."""
    size, rounds = (QUICK, 2) if quick else (FULL, 9)
    print(f"ablation: saves and restores, {rounds} rounds", flush=True)
    found: dict[str, Any] = in_ranks("ablation", 1, lambda _: _measure(size, rounds))[0]
    return found


def _measure(size: Size, rounds: int) -> dict[str, Any]:
    timer, job = StepTimer(), Training(size)
    timer.after(job)
    seconds: dict[str, Timed] = {}
    turns: list[tuple[str, str, Any]] = []
    with disk_folder() as folder:
        for variant in _VARIANTS:
            for name in _WAYS:
                path = folder / variant.replace(" ", "-")
                with _variant(variant):
                    turns.append((variant, name, make(name, path, job)))
                    turns[-1][2].save(job.state_dict(), 0)()  # starts its writer
        for number in range(1, rounds + 3):
            for variant, name, way in turns[number % len(turns) :] + turns[: number % len(turns)]:
                settle()
                with _variant(variant):
                    found = one_save(way, name, job, timer, number)
                    settle()
                    found["restore"] = _restore(way.checkpointer, job)
                if number > 2:  # the first saves have nothing to recycle
                    for what, value in found.items():
                        timed = seconds.setdefault(f"{variant}: {name}", {})
                        timed.setdefault(what, []).append(value)
        for _, _, way in turns:
            way.close()
    return {
        "size_bytes": job.size_bytes,
        "seconds": seconds,
    }


def _restore(checkpointer: Any, job: Training) -> float:
    state = job.state_dict()
    began = time.perf_counter()
    checkpointer.restore(state)
    return time.perf_counter() - began


@contextlib.contextmanager
def _variant(variant: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if variant != _WITH:
            path = {"PYTHONPATH": str(_ROOT)}
            stack.enter_context(mock.patch.dict("os.environ", path))
            stack.enter_context(mock.patch.object(client, "start_process", _start_writer))
        yield


def _start_writer(module: str, *, arguments: Any) -> Any:
    return start_process("benchmarks.checkpoint.writer_without_recycling", arguments=arguments)


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """One table: medians, and their ratios to those with recycled files."""
    rows = []
    columns = ("blocked", "durable", "restore")
    for name in _WAYS:
        base = data["seconds"][f"{_WITH}: {name}"]
        for variant in _VARIANTS:
            timed = data["seconds"][f"{variant}: {name}"]
            cells = []
            for what in columns:
                value, reference = median(timed[what]) or 0.0, median(base[what]) or 1.0
                cells += [ms(value), f"{value / reference:.2f}"]
            rows.append((name.removeprefix("ours, "), variant, *cells))
    header = [cell for what in columns for cell in (f"{what}, ms", "x with them")]
    return [
        Sheet(
            f"A save of {data['size_bytes'] / 2**20:,.0f} MiB with and without recycled files",
            ("way", "variant", *header),
            rows,
            "Ratios of medians of this run. Restores are from memory; the checkpoint before the "
            "last was removed by each save.",
        )
    ]
