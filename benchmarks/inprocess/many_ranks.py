"""Restarts of up to 128 real ranks on this machine, and what a gloo process group of them costs.

The function does no work, so what is left is the restart itself. All ranks share the few cores of
one machine; in a job, each has at least one to itself. So beside each time is what it means for one
rank: the processor time per rank, and what the simulation of the protocol predicts.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import torch.distributed as dist

from benchmarks.hosts.simulation import Model, restart
from benchmarks.lib.rank_processes import RankProcesses, free_port, wrapped
from benchmarks.lib.sheets import Sheet, median, ms
from benchmarks.lib.timestamp_board import TimestampBoard
from outlast import inprocess

__all__ = ["groups", "restarts", "sheets"]

PATIENCE_S = 400.0
SETTLE_S = 0.2
"""Time for the ranks to reach their sleep."""

EXTRAPOLATED = 1024
"""Ranks for which the cost of a gloo process group is extrapolated."""

ONE_STORE = Model(network=0.0, commit=0.0, message=0.0, wait=0.0, operation=0.0)
"""All ranks on one host: its server alone has work."""


def restarts(size: int, faults: int) -> dict[str, Any]:
    """Seconds from a fault to the last rank's entry into the function, and the prediction."""
    print(f"scale: restarts of {size} real ranks", flush=True)
    board = TimestampBoard(size, faults + 1)
    with RankProcesses("many-ranks", size) as processes:
        processes.start_all(lambda slot: _rank(board, slot, faults))
        processes.wait_all(PATIENCE_S)
    seconds = []
    for iteration in range(faults):
        fault = board.fault(iteration)
        assert fault is not None
        entries = board.entries_after(fault[0])
        assert len(entries) == size
        seconds.append(max(entries.values()) - fault[0])
    return {"seconds": seconds, "predicted": restart(1, size, ONE_STORE).seconds, **_machine()}


def _rank(board: TimestampBoard, slot: int, faults: int) -> None:
    def train(call: inprocess.CallWrapper) -> None:
        board.enter(call.iteration, slot, time.monotonic())
        if call.iteration == faults:
            return
        if slot == call.iteration % board.slots:
            while not board.all_entered(call.iteration):
                time.sleep(0.005)
            time.sleep(SETTLE_S)
            board.fail(call.iteration, slot)
            raise RuntimeError("planned")
        time.sleep(PATIENCE_S)

    wrapped(train, inprocess.Wrapper(repeated_faults=None))()


def groups(size: int, trials: int) -> dict[str, Any]:
    """Seconds of `init_process_group`, from the last rank's call to the last rank's return."""
    print(f"scale: gloo process groups of {size} ranks", flush=True)
    board = TimestampBoard(size, 2 * trials)
    ports = [free_port() for _ in range(trials)]
    with RankProcesses("many-ranks-gloo", size) as processes:
        processes.start_all(lambda slot: _groups(board, slot, ports))
        processes.wait_all(PATIENCE_S)
    seconds = [max(board.row(2 * trial + 1)) - max(board.row(2 * trial)) for trial in range(trials)]
    return {"seconds": seconds, **_machine()}


def _groups(board: TimestampBoard, slot: int, ports: list[int]) -> None:
    for trial, port in enumerate(ports):
        board.enter(2 * trial, slot, time.monotonic())
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=slot, world_size=board.slots)
        board.enter(2 * trial + 1, slot, time.monotonic())
        dist.barrier()
        time.sleep(SETTLE_S)  # a rank that closes its connections early would break the barrier
        dist.destroy_process_group()


def _machine() -> dict[str, int]:
    return {"cores": len(os.sched_getaffinity(0))}


def _fit(points: list[tuple[int, float]]) -> tuple[float, float]:
    """`a` and `b` of `a * n + b * n**2`, with the least squares of the relative errors."""
    # Each equation is divided by its time: a * n / t + b * n**2 / t = 1.
    rows = [(n / t, n * n / t) for n, t in points]
    xx, xy, yy = (math.fsum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    x1, y1 = math.fsum(r[0] for r in rows), math.fsum(r[1] for r in rows)
    determinant = xx * yy - xy * xy
    a, b = (x1 * yy - y1 * xy) / determinant, (xx * y1 - xy * x1) / determinant
    return (a, b) if a >= 0 and b >= 0 else (0.0, y1 / yy) if a < 0 else (x1 / xx, 0.0)


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The tables of `restarts` and `groups`, by size."""
    restarted = []
    for size, found in data["restarts"].items():
        seconds, predicted = median(found["seconds"]) or 0.0, found["predicted"]
        per_rank = 1e3 * seconds * found["cores"] / int(size)
        restarted.append(
            (
                size,
                str(len(found["seconds"])),
                ms(seconds),
                ms(max(found["seconds"])),
                ms(predicted),
                f"{per_rank:.1f}",
            )
        )
    points, made = [], []
    for size, found in data["groups"].items():
        seconds = median(found["seconds"]) or 0.0
        points.append((int(size), seconds))
        made.append((size, ms(seconds), f"{1e3 * seconds * found['cores'] / int(size):.1f}"))
    tables = [
        Sheet(
            "Restarts of real ranks on one machine",
            (
                "ranks",
                "faults",
                "median ms",
                "worst ms",
                "predicted ms",
                "processor ms/rank",
            ),
            restarted,
            "From an exception on one rank to the last rank's entry into the function, which "
            "sleeps: a process and a monitor process per rank. Predicted: by the simulation of "
            "the protocol, with one store server, and without the ranks' own work. The rest is "
            "that work, on shared cores: median x cores / ranks is its processor time per rank.",
        )
    ]
    if points:
        cores = next(iter(data["groups"].values()))["cores"]
        a, b = _fit(points)
        total = a * EXTRAPOLATED + b * EXTRAPOLATED**2
        made.append(
            (
                f"{EXTRAPOLATED:,}, extrapolated",
                ms(total),
                f"{1e3 * total * cores / EXTRAPOLATED:.1f}",
            )
        )
        tables.append(
            Sheet(
                "A gloo process group: init_process_group",
                ("ranks", "ms", "processor ms/rank"),
                made,
                "Medians, from the last rank's call to the last rank's return, on shared cores; "
                "torch resolves names, which takes a second if the resolver drops a query. Fit, by "
                f"the least squares of the relative errors: {1e3 * a:.2f} ms x n + "
                f"{1e6 * b:.2f} us x n^2 for n ranks on {cores} cores (each rank connects to each "
                "other). Processor time per rank is that x cores / n: what a restart with gloo "
                "adds where each rank has a core, if rank 0's store keeps up.",
            )
        )
    return tables
