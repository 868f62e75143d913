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
    stop_at: int | None = None,
) -> Losses:
    """Runs the script to its end in a new folder, with these faults, one per iteration. With
    `stop_at`, a rank gets SIGTERM in that step of a first run, which must lose no step.
    """
    folder.mkdir()
    options = [f"--nproc-per-node={nprocs}", "--max-restarts=8"]
    if faults:
        plan = folder / "plan.json"
        plan.write_text(json.dumps({"faults": list(faults)}))
        options.append(f"--chaos={plan}")
    losses: Losses = {}
    if stop_at is not None:
        environment = {"STOP_AT": str(stop_at)}
        with Run(folder, script.read_text(), *options[:2], args=arguments, env=environment) as run:
            assert run.wait() == 143, run.err[-10_000:]
            _collect(run, losses)
    done = max((step for _, step in losses), default=0)
    with Run(folder, script.read_text(), *options, args=arguments) as run:
        for number, fault in enumerate(faults):
            run.until_said(f"fires {fault['kind']} at iteration {number}")
        assert run.wait() == 0, run.err[-10_000:]
        first = min(int(step) for _, step, _ in _LINE.findall(run.out))
        assert first == done + 1, f"steps {first} to {done} were made again"
        _collect(run, losses)
    return losses


def _collect(run: Run, losses: Losses) -> None:
    for rank, step, value in _LINE.findall(run.out):
        losses.setdefault((int(rank), int(step)), set()).add(value)
