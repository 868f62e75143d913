"""Detection of a hang with `soft_timeout=Adaptive(...)`, in step times, and the restart after it.

Four ranks step every few milliseconds; one then sleeps, with the GIL released. The fixed default
timeout would detect it after a minute.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.inprocess import false_alarms
from benchmarks.lib.faults import RANKS, part
from benchmarks.lib.rank_processes import RankProcesses, wrapped
from benchmarks.lib.sheets import Sheet, median, ms, quantile
from benchmarks.lib.timestamp_board import TimestampBoard
from outlast import inprocess

__all__ = ["measure", "run", "sheets"]

STEP_S = 0.005
STEPS = 100
FLOORS_MS = (500, 100, 50, 20)
ALARM_FLOOR_MS, ALARM_STEPS = 100, 100_000
GOAL_STEPS, GOAL_S = 3, 0.1
"""A hang is seen within so many steps, or after this time: the longer one counts."""


def run(quick: bool) -> dict[str, Any]:
    """Measures with several floors of the adaptive timeout; the first one is the default."""
    floors = FLOORS_MS[-1:] if quick else FLOORS_MS
    hangs = 2 if quick else 20
    found = {str(floor): measure(floor, hangs) for floor in floors}
    steps = 2000 if quick else ALARM_STEPS
    return {"floors": found, "undisturbed": false_alarms.false_alarms(ALARM_FLOOR_MS, steps)}


def measure(floor_ms: int, hangs: int, *, raises: bool = False) -> dict[str, Any]:
    """With `raises`, the rank raises an exception instead: what a hang's restart is compared to."""
    print(f"hang: floor {floor_ms} ms, {hangs} {'exceptions' if raises else 'hangs'}", flush=True)
    board = TimestampBoard(RANKS, hangs * 3 + 16)
    with RankProcesses(f"hang-{floor_ms}", RANKS) as processes:
        processes.env["OUTLAST_EVENTS_DIR"] = str(processes.folder)
        processes.start_all(lambda slot: _rank(board, slot, floor_ms, hangs, raises))
        processes.wait_all(120 + 5 * hangs)
        seen = _times(processes.folder, "rank*.jsonl", "seen")
        steps = json.loads((processes.folder / "steps.json").read_text())
    detection, recovery, false_alarms = [], [], 0
    for iteration in range(board.newest):
        fault = board.fault(iteration)
        if fault is None:
            false_alarms += 1  # restarted before its hang: a step took too long on a busy machine
            continue
        known = min(t for t in seen if t > fault[0])
        detection.append(known - fault[0])
        recovery.append(max(board.entries_after(known).values()) - known)
    return {
        "step": statistics.median(steps),
        "longest_step": max(steps),
        "detection": detection,
        "recovery": recovery,
        "false_alarms": false_alarms,
    }


def _rank(board: TimestampBoard, slot: int, floor_ms: int, hangs: int, raises: bool) -> None:
    timeout = inprocess.Adaptive(floor=datetime.timedelta(milliseconds=floor_ms))

    def train(call: inprocess.CallWrapper) -> None:
        iteration = call.iteration
        board.enter(iteration, slot, time.monotonic())
        trial = board.faults
        dist.init_process_group("gloo")
        data, taken = torch.ones(1 << 12), []
        for _ in range(STEPS):
            start = time.monotonic()
            time.sleep(STEP_S)
            dist.all_reduce(data)
            call.ping()
            taken.append(time.monotonic() - start)
        if slot == 0:
            _note_steps(taken[10:])
        if trial >= hangs:
            part()
            return
        if slot == trial % RANKS:
            board.fail(iteration, slot)
            if raises:
                raise RuntimeError("planned")
            time.sleep(3600)
        dist.all_reduce(data)

    wrapped(train, inprocess.Wrapper(soft_timeout=timeout, repeated_faults=None))()


def _note_steps(taken: list[float]) -> None:
    Path(os.environ["OUTLAST_EVENTS_DIR"], "steps.json").write_text(json.dumps(taken))


def _times(folder: Path, pattern: str, kind: str) -> list[float]:
    lines = (line for path in folder.glob(pattern) for line in path.read_text().splitlines())
    return sorted(event["time"] for event in map(json.loads, lines) if event["kind"] == kind)


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The tables of the results."""
    rows = []
    for floor, found in data["floors"].items():
        seen, step = found["detection"], found["step"]
        goal = max(GOAL_S, GOAL_STEPS * step)
        rows.append(
            (
                f"Adaptive(floor={floor} ms)",
                str(len(seen)),
                ms(step),
                ms(median(seen)),
                f"{(median(seen) or 0.0) / step:.0f}",
                ms(max(seen)),
                ms(median(found["recovery"])),
                ms(quantile(found["recovery"], 1.0)),
                str(found["false_alarms"]),
                ms(goal),
                "met" if (median(seen) or 0.0) <= goal and not found["false_alarms"] else "missed",
            )
        )
    return [
        Sheet(
            f"A hang with the GIL released, {RANKS} ranks (ms)",
            (
                "soft timeout",
                "hangs",
                "step",
                "seen after",
                "in steps",
                "worst",
                "restart then",
                "worst restart",
                "false alarms",
                "goal",
                "verdict",
            ),
            rows,
            "Seen: from the hang until a rank detects it. Restart: from there to the last entry. "
            "Goal: seen within three steps or 100 ms, without a false alarm; four ranks share two "
            "cores here.",
        ),
        false_alarms.sheet(data["undisturbed"]),
    ]
