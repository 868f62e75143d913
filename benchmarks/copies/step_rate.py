"""The cost of copies to running training: steps per second with saves, with and without copies.

Two ranks, each a "host" of its own, on one machine: sending and receiving use its processors, which
on real hosts are those of two. A segment begins with a save, and is long enough for its copy.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.checkpoint.limits import settle
from benchmarks.checkpoint.saves import disk_folder, in_ranks
from benchmarks.checkpoint.training_state import Size, Training
from outlast.async_checkpoint import Checkpointer, Retention
from outlast.events.event import Event
from outlast.events.types import CopyCompleted, CopySkipped

__all__ = ["RANKS", "WAYS", "be_host", "measure"]

RANKS = 2
WAYS = {"without saves": -1, "saves": 0, "saves with copies": 1}


def be_host(number: int) -> None:
    """Makes this rank one of a host of its own."""
    os.environ.update(OUTLAST_HOST=f"host{number}", OUTLAST_HOST_ADDR=f"127.0.0.{number + 1}")


def measure(size: Size, steps: int, rounds: int) -> dict[str, Any]:
    """Steps per second of the slower rank in each round, for each way; and the copies made."""
    print(f"copies: a training that saves, {rounds} rounds", flush=True)
    found = in_ranks("copies-rate", RANKS, lambda slot: _rank(slot, size, steps, rounds))
    rates = {
        way: [min(pair) for pair in zip(*(part["rates"][way] for part in found), strict=True)]
        for way in WAYS
    }
    return {**found[0], "rates": rates}


class _Copies:
    """What becomes of the copies of steps 0 (before a segment) and 1 (in it)."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._first = threading.Semaphore(0)

    def write(self, event: Event) -> None:
        if isinstance(event, CopyCompleted | CopySkipped) and event.step == 0:
            self._first.release()
        elif isinstance(event, CopyCompleted):
            self.seconds.append(event.seconds)

    def await_first(self) -> None:
        """Waits for the end of the copy of step 0."""
        self._first.acquire()

    def close(self) -> None:
        pass


def _rank(slot: int, size: Size, steps: int, rounds: int) -> dict[str, Any]:
    be_host(slot)
    job = Training(size, init_device_mesh("cpu", (RANKS,)))
    copies = _Copies()
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    with disk_folder() as folder:
        for number in range(rounds):
            names = list(WAYS) if number % 2 == 0 else list(WAYS)[::-1]
            for way in names:
                rates[way].append(_segment(job, folder, WAYS[way], steps, copies))
    return {
        "size_bytes": job.size_bytes,
        "rates": rates,
        "copies": copies.seconds,
    }


def _segment(job: Training, folder: Path, replicas: int, steps: int, copies: _Copies) -> float:
    checkpointer = None
    if replicas >= 0:
        path = folder / str(replicas)
        checkpointer = Checkpointer(path, keep=Retention(last=1), replicas=replicas, events=copies)
        checkpointer.save(0, job.state_dict()).wait()  # the first save is measured elsewhere
        if replicas:
            copies.await_first()
    settle()
    dist.barrier()
    began = time.perf_counter()
    if checkpointer is not None:
        checkpointer.save(1, job.state_dict())
    for _ in range(steps):
        job.train()
    rate = steps / (time.perf_counter() - began)
    if checkpointer is not None:
        checkpointer.close()
    dist.barrier()
    return rate
