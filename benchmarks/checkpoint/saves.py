"""The cost of a save: seconds until training continues, and until the checkpoint is durable.

All ways and the limits of the machine are measured alternately in the same processes, in a
different order each round: ratios compare adjacent measurements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.checkpoint.limits import Writing, copy_in_threads, copy_time, settle
from benchmarks.checkpoint.restores import restores
from benchmarks.checkpoint.training_state import Size, Training
from benchmarks.checkpoint.ways import OURS, PEERS, Way, chosen, make
from benchmarks.lib.rank_processes import FOLDER, RankProcesses

__all__ = [
    "BESIDE",
    "PATIENCE_S",
    "StepTimer",
    "Timed",
    "call",
    "disk_folder",
    "in_ranks",
    "measure",
    "one_save",
]

PATIENCE_S = 1800.0
BESIDE = "memcpy beside a pass"

Timed = dict[str, list[float]]


def measure(
    size: Size, ranks: int, rounds: int, *, quick: bool = False, peers: bool = True
) -> dict[str, Any]:
    """Seconds of each way in each round, on the slowest rank. `peers`: also those of others."""
    print(f"checkpoint: saves and restores, {ranks} ranks, {rounds} rounds", flush=True)
    parts = in_ranks("checkpoint-saves", ranks, lambda _: _rank(size, ranks, rounds, quick, peers))
    seconds: dict[str, Timed] = {}
    for name, timed in parts[0]["seconds"].items():
        seconds[name] = {
            what: [
                max(each) for each in zip(*(p["seconds"][name][what] for p in parts), strict=True)
            ]
            for what in timed
        }
    return {
        "ranks": ranks,
        "size_bytes": sum(part["size_bytes"] for part in parts),
        "tensors": parts[0]["tensors"],
        "sources": parts[0]["sources"],
        "seconds": seconds,
    }


def in_ranks(name: str, ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """Runs `work` in new processes, in a process group if there are several; returns results."""
    with RankProcesses(name, ranks) as processes:
        processes.start_all(lambda slot: call(slot, ranks, work, processes.folder))
        processes.wait_all(PATIENCE_S)
        return [
            json.loads((processes.folder / f"found{slot}.json").read_text())
            for slot in range(ranks)
        ]


def call(slot: int, ranks: int, work: Callable[[int], Any], folder: Path) -> None:
    """The body of a new process: runs `work` in a process group; stores the result in a file."""
    # torch's default, one thread per core, divided among the ranks.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    # Also for a single rank: the background process of a torch way creates its own group.
    dist.init_process_group("gloo")
    found = work(slot)
    dist.barrier()
    (folder / f"found{slot}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@contextlib.contextmanager
def disk_folder() -> Iterator[Path]:
    """A folder on the disk, for all ranks."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    name = tempfile.mkdtemp(dir=FOLDER.absolute(), prefix="saves-") if _rank_0() else ""
    told = [name]
    dist.broadcast_object_list(told)
    try:
        yield Path(told[0])
    finally:
        dist.barrier()
        if _rank_0():
            import shutil

            shutil.rmtree(told[0], ignore_errors=True)


def _rank_0() -> bool:
    return dist.get_rank() == 0


def _rank(size: Size, ranks: int, rounds: int, quick: bool, peers: bool) -> dict[str, Any]:
    mesh = None
    if ranks > 1:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (ranks,))
    timer = StepTimer()
    job = Training(size, mesh)
    timer.after(job)
    seconds: dict[str, Timed] = {}
    with disk_folder() as folder:
        threads = max(1, 2 // ranks)
        tensors = job.tensors()
        buffers = [torch.zeros_like(tensor) for tensor in tensors]
        writing = Writing(folder, job.size_bytes, threads)
        ways = {
            name: make(name, folder, job)
            for name in chosen((*OURS, *(PEERS if peers else ())), quick)
            if "2 in flight" not in name
        }
        turns: dict[str, Callable[[int], dict[str, float]]] = {
            "memcpy": lambda _: {"seconds": copy_time(tensors, buffers)},
            "raw write": lambda _: {"seconds": writing.time(direct=False)},
            "raw write, O_DIRECT": lambda _: {"seconds": writing.time(direct=True)},
            "a forward and backward pass": lambda _: {"seconds": _timed(job.pass_through)},
            BESIDE: lambda _: _copy_beside(job, tensors, buffers),
            **{
                name: functools.partial(one_save, way, name, job, timer)
                for name, way in ways.items()
            },
        }
        for turn in range(rounds + 1):
            names = list(turns)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                settle()
                dist.barrier()
                found = turns[name](turn)
                for what, value in found.items() if turn else ():  # the first turn warms up
                    seconds.setdefault(name, {}).setdefault(what, []).append(value)
        for way in ways.values():
            way.close()
            dist.barrier()
        small = Training(dataclasses.replace(size, dim=16, vocabulary=256), mesh)
        restored, sources = restores(folder, job, small, tensors, buffers, threads, rounds)
        seconds.update(restored)
    return {
        "size_bytes": job.size_bytes,
        "tensors": len(tensors),
        "sources": sources,
        "seconds": seconds,
    }


def one_save(way: Way, name: str, job: Training, timer: StepTimer, step: int) -> dict[str, float]:
    """One save; with a training step, if the way copies during the step."""
    state = job.state_dict()
    began = time.perf_counter()
    wait = way.save(state, step)
    blocked = time.perf_counter() - began
    if "overlapped" not in name and "beside" not in name:
        wait()
        return {"blocked": blocked, "durable": time.perf_counter() - began}
    passing = _timed(job.pass_through)
    waiting = _timed(way.before_step)
    job.optimizer.step()
    wait()
    return {
        "blocked": blocked + waiting + timer.waited,
        "durable": time.perf_counter() - began,
        "pass": passing,
    }


def _copy_beside(
    job: Training, tensors: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
) -> dict[str, float]:
    """How long training waits for plain threads that copy during a pass: the limit of a save that
    overlaps with one, which has to share the cores with it.
    """
    copying = threading.Thread(target=copy_in_threads, args=(tensors, buffers))
    copying.start()
    passing = _timed(job.pass_through)
    return {"seconds": _timed(copying.join), "pass": passing}


class StepTimer:
    """Measures how long other hooks delay an optimizer's step. Created before the other hooks."""

    def __init__(self) -> None:
        self.waited = 0.0
        self._began = 0.0
        register_optimizer_step_pre_hook(self._first)

    def after(self, job: Training) -> None:
        """An optimizer's own hooks run after the global ones."""
        job.optimizer.register_step_pre_hook(self._last)

    def _first(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _last(self, *_: Any) -> None:
        self.waited = time.perf_counter() - self._began


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
