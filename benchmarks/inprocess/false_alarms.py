"""False alarms of `Adaptive` in a training that only trains: with evaluations, saves, garbage
collection, and for half of the time two processes that use all cores.

Evaluations are declared as long phases, as the page on hangs says. Everything else is between two
pings: a save that is due, a collection of all generations, and what the scheduler of a loaded
machine does.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast
from benchmarks.lib.rank_processes import FOLDER, RankProcesses, wrapped
from benchmarks.lib.sheets import Sheet, ms
from outlast import inprocess

__all__ = ["false_alarms", "sheet"]

RANKS, CORES = 2, 2
_SAVE, _COLLECT, _EVALUATE = 200, 500, 1000  # steps between two of them
_EVALUATION = 30  # batches


def false_alarms(floor_ms: int, steps: int) -> dict[str, Any]:
    """Trains for so many steps; what was taken for a hang, and the longest gaps between pings."""
    print(f"hang: {steps:,} steps without one, floor {floor_ms} ms", flush=True)
    with (
        RankProcesses("hang-false-alarms", RANKS) as processes,
        tempfile.TemporaryDirectory(dir=FOLDER.absolute(), prefix="alarms-") as checkpoints,
    ):
        folder = processes.folder
        alarms_file = folder / "alarms.jsonl"
        alarms_file.touch()
        processes.start_all(lambda slot: _rank(slot, folder, Path(checkpoints), floor_ms, steps))
        halfway = folder / "halfway"
        while not halfway.exists():
            processes.ended(0.5)
            processes.check()
        for number in range(CORES):
            processes.start(-1 - number, _compute)
        processes.wait_all(3600)
        alarms = [json.loads(line) for line in alarms_file.read_text().splitlines()]
        gaps = json.loads((folder / "gaps.json").read_text())
    return {"floor_ms": floor_ms, "steps": steps, "alarms": alarms, "gaps": gaps}


def _compute() -> None:
    while True:
        sum(range(100_000))


def _rank(slot: int, folder: Path, checkpoints: Path, floor_ms: int, steps: int) -> None:
    timeout = inprocess.Adaptive(floor=floor_ms / 1000)
    gaps: list[float] = []

    def train(call: inprocess.CallWrapper) -> None:
        dist.init_process_group("gloo")
        if slot == 0 and call.iteration:
            with (folder / "alarms.jsonl").open("a") as file:
                file.write(f"{len(gaps)}\n")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters())
        inputs = torch.randn(64, 32)
        with outlast.Job(checkpoints, model=model, optimizer=optimizer, every=_SAVE) as job:
            job.restore()
            last = time.monotonic()
            while job.steps < steps:
                ddp(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                job.step()
                if job.steps % _COLLECT == 0:
                    gc.collect()
                call.ping()
                now = time.monotonic()
                gaps.append(now - last)
                last = now
                if job.steps % _EVALUATE == 0:
                    with call.long_phase(), torch.no_grad():
                        for _ in range(_EVALUATION):
                            ddp(inputs)
                    last = time.monotonic()
                if slot == 0 and job.steps == steps // 2:
                    (folder / "halfway").touch()

    wrapped(train, inprocess.Wrapper(soft_timeout=timeout, repeated_faults=None))()
    if slot == 0:
        half = len(gaps) // 2
        found = [[max(each), sorted(each)[len(each) // 2]] for each in (gaps[:half], gaps[half:])]
        (folder / "gaps.json").write_text(json.dumps(found))


def sheet(found: dict[str, Any]) -> Sheet:
    """The table of `false_alarms`."""
    rows = []
    half = found["steps"] // 2
    for number, (what, (longest, middle)) in enumerate(
        zip(("idle machine", "all cores in use"), found["gaps"], strict=True)
    ):
        alarms = sum((at >= half) == bool(number) for at in found["alarms"])
        rows.append(
            (
                what,
                f"{half:,}",
                ms(middle),
                ms(longest),
                str(alarms),
                "0",
                "met" if not alarms else "missed",
            )
        )
    return Sheet(
        f"False alarms of Adaptive(floor={found['floor_ms']} ms), {RANKS} ranks with DDP",
        ("", "steps", "a step, ms", "longest, ms", "false alarms", "goal", "verdict"),
        rows,
        f"A save every {_SAVE} steps, a garbage collection every {_COLLECT}, an evaluation every "
        f"{_EVALUATE}, which is declared with `long_phase`. In use: {CORES} more processes "
        "compute.",
    )
