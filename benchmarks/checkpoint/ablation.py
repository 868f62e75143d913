"""Whether two optimizations of the checkpointer pay off: saves and restores with and without each.

- Recycled files: a save writes over the files of the checkpoint that was removed last. Without
  them, it creates files and the old ones are removed.
- The compiled copy, which bypasses the caches. Without it, the C library's `memcpy` is used.

All variants take turns in one process, in a different order each round.
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
from outlast.async_checkpoint.restore import verified_read
from outlast.async_checkpoint.snapshot import chunk_copy, nontemporal_copy
from outlast.async_checkpoint.writer import client
from outlast.system.background_process import start_process

__all__ = ["run", "sheets"]

_BOTH = "with both"
_VARIANTS = (_BOTH, "without recycled files", "without the compiled copy")
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
        "compiled": nontemporal_copy.streams,
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
        if "copy" in variant:
            copy, _ = nontemporal_copy.load(Path("/nonexistent"))
            for module in (chunk_copy, verified_read):
                stack.enter_context(mock.patch.object(module, "move", copy))
        if "recycled" in variant:
            path = {"PYTHONPATH": str(_ROOT)}
            stack.enter_context(mock.patch.dict("os.environ", path))
            stack.enter_context(mock.patch.object(client, "start_process", _start_writer))
        yield


def _start_writer(module: str, *, arguments: Any) -> Any:
    return start_process("benchmarks.checkpoint.writer_without_recycling", arguments=arguments)


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """One table: medians, and their ratios to those with both."""
    rows = []
    columns = ("blocked", "durable", "restore")
    for name in _WAYS:
        base = data["seconds"][f"{_BOTH}: {name}"]
        for variant in _VARIANTS:
            timed = data["seconds"][f"{variant}: {name}"]
            cells = []
            for what in columns:
                value, reference = median(timed[what]) or 0.0, median(base[what]) or 1.0
                cells += [ms(value), f"{value / reference:.2f}"]
            rows.append((name.removeprefix("ours, "), variant, *cells))
    header = [cell for what in columns for cell in (f"{what}, ms", "x with both")]
    note = "" if data["compiled"] else " The copy was not compiled on this machine."
    return [
        Sheet(
            f"A save of {data['size_bytes'] / 2**20:,.0f} MiB without recycled files, and without "
            "the compiled copy",
            ("way", "variant", *header),
            rows,
            "Ratios of medians of this run. Restores are from memory; the checkpoint before the "
            f"last was removed by each save.{note}",
        )
    ]
