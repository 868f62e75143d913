"""Checkpoints: what a save costs the training, when it is durable, and how fast it is back.

Everything is told as a ratio to what the machine can do, or to the loss of others, in one run: see
`checkpoint_saves`, `checkpoint_restores`, `checkpoint_first`, `checkpoint_memory` and
`checkpoint_training`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import checkpoint_first, checkpoint_memory, checkpoint_saves, checkpoint_training
from benchmarks.checkpoint_job import FULL, QUICK, SHARE, SMALL
from benchmarks.checkpoint_sheets import sheets

__all__ = ["run", "sheets"]


PARTS = ("one", "ranks", "first", "peaks", "flat", "training")


def run(quick: bool, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """Measures all of it, or some parts."""
    if quick:
        measures: dict[str, Callable[[], Any]] = {
            "one": lambda: checkpoint_saves.measure(QUICK, 1, 1, quick=True),
            "ranks": lambda: checkpoint_saves.measure(QUICK, 2, 1, quick=True),
            "first": lambda: checkpoint_first.measure(QUICK, 1, quick=True),
            "peaks": lambda: checkpoint_memory.peaks(QUICK, 2, quick=True),
            "flat": lambda: checkpoint_memory.flat(QUICK, 4, 1),
            "training": lambda: checkpoint_training.measure(QUICK, {1: 2, 10: 10}, 1, quick=True),
        }
    else:
        measures = {
            "one": lambda: checkpoint_saves.measure(FULL, 1, 7),
            "ranks": lambda: checkpoint_saves.measure(SHARE, 4, 7),
            "first": lambda: checkpoint_first.measure(FULL, 5),
            "peaks": lambda: checkpoint_memory.peaks(FULL, 5),
            "flat": lambda: checkpoint_memory.flat(SMALL, 200, 10),
            "training": lambda: checkpoint_training.measure(SHARE, {1: 16, 10: 40, 100: 100}, 7),
        }
    return {part: measures[part]() for part in parts}
