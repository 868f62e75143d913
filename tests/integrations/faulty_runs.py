"""Runs a training script under `outlast run` with planned faults, and reads the losses it prints.

Each rank prints `step N: loss VALUE`, with all digits, after each step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.runs import Run

Losses = dict[tuple[int, int], set[str]]
"""By rank and step: all values that were printed, one per pass over that step."""

_LINE = re.compile(r"^\[(\d)\] step (\d+): loss (\S+)$", re.MULTILINE)


def losses_of(
    folder: Path,
    script: Path,
    arguments: Sequence[str],
    *,
    nprocs: int,
    faults: Sequence[dict[str, Any]] = (),
) -> Losses:
    """Runs the script to its end in a new folder, with these faults, one per iteration."""
    folder.mkdir()
    options = [f"--nproc-per-node={nprocs}", "--max-restarts=8"]
    if faults:
        plan = folder / "plan.json"
        plan.write_text(json.dumps({"faults": list(faults)}))
        options.append(f"--chaos={plan}")
    with Run(folder, script.read_text(), *options, args=arguments) as run:
        for number, fault in enumerate(faults):
            run.until_said(f"fires {fault['kind']} at iteration {number}")
        assert run.wait() == 0, run.err[-10_000:]
        losses: Losses = {}
        for rank, step, value in _LINE.findall(run.out):
            losses.setdefault((int(rank), int(step)), set()).add(value)
        return losses
