"""Checkpoints: the cost of a save to training, its time until durable, and restores.

Results are ratios to the limits of the machine, or to other ways, measured in the same run: see
`saves`, `restores`, `first_save` and `memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.checkpoint import first_save, memory, saves
from benchmarks.checkpoint.sheets import sheets
from benchmarks.checkpoint.training_state import FULL, QUICK, SHARE, SMALL

__all__ = ["run", "sheets"]


PARTS = ("one", "ranks", "first", "peaks", "flat")


def run(quick: bool, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """Runs all measurements, or some parts."""
    if quick:
        measures: dict[str, Callable[[], Any]] = {
            "one": lambda: saves.measure(QUICK, 1, 1, quick=True),
            "ranks": lambda: saves.measure(QUICK, 2, 1, quick=True),
            "first": lambda: first_save.measure(QUICK, 1, quick=True),
            "peaks": lambda: memory.peaks(QUICK, 2, quick=True),
            "flat": lambda: memory.flat(QUICK, 4, 1),
        }
    else:
        measures = {
            "one": lambda: saves.measure(FULL, 1, 7),
            "ranks": lambda: saves.measure(SHARE, 4, 7),
            "first": lambda: first_save.measure(FULL, 5),
            "peaks": lambda: memory.peaks(FULL, 5),
            "flat": lambda: memory.flat(SMALL, 200, 10),
        }
    return {part: measures[part]() for part in parts}
