"""A thousand restarts in a row: descriptors, threads, children and memory must not grow, and the
store by two short keys a restart only.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from benchmarks.lib.faults import part
from benchmarks.lib.rank_processes import RankProcesses, wrapped
from benchmarks.lib.sheets import Sheet, median, ms, quantile
from benchmarks.lib.timestamp_board import TimestampBoard
from outlast import inprocess

__all__ = ["run", "sheets"]

RANKS = 2
WHAT = ("descriptors", "threads", "children", "memory, MiB", "memory of its own, MiB")
STORE = ("keys", "bytes of the keys and their values")


def run(quick: bool) -> dict[str, Any]:
    """Restarts repeatedly, with a sample of each rank and its monitor every few iterations."""
    restarts, every = (30, 5) if quick else (1000, 20)
    print(f"soak: {restarts} restarts", flush=True)
    board = TimestampBoard(RANKS, restarts + 16)
    with RankProcesses("soak", RANKS) as processes:
        processes.start_all(lambda slot: _rank(board, slot, restarts, every, str(processes.folder)))
        processes.wait_all(120 + restarts)
        samples = {
            f"{who} {slot}": json.loads((processes.folder / f"{who}{slot}.json").read_text())
            for slot in range(RANKS)
            for who in ("rank", "monitor")
        }
        samples["store"] = json.loads((processes.folder / "store0.json").read_text())
    restart = []
    for iteration in range(board.newest):
        fault = board.fault(iteration)
        if fault is not None:
            restart.append(max(board.entries_after(fault[0]).values()) - fault[0])
    return {"restarts": len(restart), "samples": samples, "restart": restart}


def _rank(board: TimestampBoard, slot: int, restarts: int, every: int, folder: str) -> None:
    mine: list[list[float]] = []
    monitors: list[list[float]] = []
    store: list[list[float]] = []
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])  # of the job, before a call

    def train(call: inprocess.CallWrapper) -> None:
        iteration = call.iteration
        board.enter(iteration, slot, time.monotonic())
        if iteration % every == 0:
            mine.append([iteration, *_sample(os.getpid())])
            if call.monitor_pid is not None:
                monitors.append([iteration, *_sample(call.monitor_pid)])
            if slot == 0:
                store.append([iteration, *_size_of_store(*address)])
        dist.init_process_group("gloo")
        data = torch.ones(1 << 10)
        dist.all_reduce(data)
        if iteration >= restarts:
            part()
            return
        if slot == iteration % RANKS:
            board.fail(iteration, slot)
            raise RuntimeError(f"planned fault {iteration}")
        dist.all_reduce(data)

    wrapped(train, inprocess.Wrapper(repeated_faults=None))()
    Path(folder, f"rank{slot}.json").write_text(json.dumps(mine))
    Path(folder, f"monitor{slot}.json").write_text(json.dumps(monitors))
    Path(folder, f"store{slot}.json").write_text(json.dumps(store))


def _sample(pid: int) -> list[float]:
    process = psutil.Process(pid)
    return [
        process.num_fds(),
        process.num_threads(),
        len(process.children()),
        process.memory_info().rss / 2**20,
        process.memory_full_info().uss / 2**20,
    ]


def _size_of_store(address: str, port: int) -> list[float]:
    store = TCPStore(address, port, is_master=False)
    keys = store.list_keys()
    return [len(keys), sum(len(key) + len(store.get(key)) for key in keys)]


def slope(samples: list[list[float]], column: int) -> float:
    """Growth per 1,000 restarts: a least-squares line through the second half, after warm-up."""
    half = samples[len(samples) // 2 :]
    if len(half) < 2:
        return 0.0
    line = statistics.linear_regression([s[0] for s in half], [s[column] for s in half])
    return 1000 * line.slope


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The tables of the results."""
    rows = []
    for who, samples in data["samples"].items():
        early = samples[min(1, len(samples) - 1)]
        for column, what in enumerate(STORE if who == "store" else WHAT, start=1):
            rows.append(
                (
                    f"{who}: {what}",
                    f"{early[column]:.0f}",
                    f"{samples[-1][column]:.0f}",
                    f"{max(s[column] for s in samples):.0f}",
                    f"{slope(samples, column):+.2f}",
                )
            )
    times = data["restart"]
    return [
        Sheet(
            f"{data['restarts']:,} restarts in a row, {RANKS} ranks",
            ("what", "early", "at the end", "most", "growth per 1,000 restarts"),
            rows,
            f"A restart took {ms(median(times))} ms (median), {ms(quantile(times, 0.99))} ms (p99) "
            f"and {ms(max(times))} ms (worst). Growth: a line through the second half.",
        )
    ]
