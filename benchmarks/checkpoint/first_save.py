"""The first save of a process, with everything cold: each one in a new process."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.checkpoint.limits import settle
from benchmarks.checkpoint.saves import StepTimer, Timed, disk_folder, in_ranks, one_save
from benchmarks.checkpoint.training_state import Size, Training
from benchmarks.checkpoint.ways import chosen, make
from outlast.async_checkpoint import Checkpointer

__all__ = ["AFTER_RESTORE", "COPY", "measure"]

AFTER_RESTORE = "ours, eager, after a restore"
COPY = "memcpy into new memory"
NAMES = (
    COPY,
    "ours, eager",
    AFTER_RESTORE,
    "ours, overlapped",
    "torch.save",
    "dcp.save",
    "dcp.async_save",
    "async_save, cached stager",
    "async_save, cached stager, staged beside",
    "async_save, cached stager, a process",
    "fork",
    "torch-checkpointing",
    "lm-resiliency",
)


def measure(
    size: Size, rounds: int, *, quick: bool = False, peers: bool = True
) -> dict[str, Timed]:
    """Seconds of each way's first save, and of opening it before. `peers`: also of others' ways."""
    print(f"checkpoint: the first save, {rounds} rounds", flush=True)
    found: dict[str, Timed] = {}
    for _ in range(rounds):
        for name in NAMES[:3] if quick else chosen(NAMES if peers else NAMES[:4], quick):
            work = functools.partial(_first, name, size)
            for what, value in in_ranks("checkpoint-first", 1, work)[0].items():
                found.setdefault(name, {}).setdefault(what, []).append(value)
    return found


def _first(name: str, size: Size, _: int) -> dict[str, float]:
    timer = StepTimer()
    job = Training(size)
    timer.after(job)
    with disk_folder() as folder:
        if name == COPY:
            return _copy(job)
        if name == AFTER_RESTORE:
            return _after_restore(folder, job)
        settle()
        began = time.perf_counter()
        way = make(name, folder, job)
        opened = time.perf_counter() - began
        found = one_save(way, name, job, timer, 1)
        way.close()
        return {"open": opened, **found}


def _copy(job: Training) -> dict[str, float]:
    tensors = job.tensors()
    began = time.perf_counter()
    copies = [tensor.clone() for tensor in tensors]
    spent = time.perf_counter() - began
    del copies
    return {"blocked": spent}


def _after_restore(folder: Path, job: Training) -> dict[str, float]:
    # Another process, the writer, writes the checkpoint, so no part stays in this process.
    path = folder / "before"
    with Checkpointer(path) as checkpointer:
        checkpointer.save(1, job.state_dict())
    settle()
    state: dict[str, Any] = job.state_dict()
    began = time.perf_counter()
    checkpointer = Checkpointer(path)
    opened = time.perf_counter() - began
    checkpointer.restore(state)
    restored = time.perf_counter() - began - opened
    settle()
    dist.barrier()
    began = time.perf_counter()
    handle = checkpointer.save(2, job.state_dict())
    blocked = time.perf_counter() - began
    handle.wait()
    durable = time.perf_counter() - began
    checkpointer.close()
    return {"open": opened, "restore": restored, "blocked": blocked, "durable": durable}
