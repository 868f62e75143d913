"""`Job.save` and `Job.restore` against one `torch.save` and `torch.load` of the same content."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint.limits import settle
from benchmarks.checkpoint.saves import disk_folder, in_ranks
from benchmarks.checkpoint.training_state import Size, Training
from outlast.elastic import ElasticSampler, Job

__all__ = ["measure", "through_torch"]


def measure(size: Size, rounds: int) -> dict[str, Any]:
    """Seconds of each operation, alternately in one process."""
    print("elastic: a job's state", flush=True)
    found: dict[str, Any] = in_ranks("elastic-state", 1, lambda _: _measure(size, rounds))[0]
    return found


def _measure(size: Size, rounds: int) -> dict[str, Any]:
    training = Training(size)
    sampler = ElasticSampler(10**6, global_batch_size=32)
    seconds: dict[str, list[float]] = {}
    with disk_folder() as folder:
        job = Job(
            folder / "job",
            model=training.model,
            optimizer=training.optimizer,
            loader=sampler,
            every=None,
            overlap=False,
        )
        job.restore()
        for number in range(rounds + 1):
            job.steps += 1
            turns: dict[str, Callable[[], dict[str, float]]] = {
                "torch": functools.partial(through_torch, training, sampler, folder / "torch"),
                "job": functools.partial(_job, job),
            }
            for name in list(turns)[:: 1 if number % 2 else -1]:
                settle()
                for what, took in turns[name]().items():
                    if number:
                        seconds.setdefault(what, []).append(took)
        job.close()
    return {"size_bytes": training.size_bytes, "seconds": seconds}


def through_torch(training: Training, sampler: ElasticSampler, path: Path) -> dict[str, float]:
    """Seconds to write, sync and load one file with the state of a job."""
    content = {**training.state_dict(), "loader": sampler.state_dict()}
    began = time.perf_counter()
    with path.open("wb") as file:
        torch.save(content, file)
        written = time.perf_counter() - began
        file.flush()
        os.fsync(file.fileno())
    durable = time.perf_counter() - began
    del content  # the loaded state replaces it
    settle()
    began = time.perf_counter()
    state = torch.load(path)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    sampler.load_state_dict(state["loader"])
    return {
        "torch.save": written,
        "torch.save, durable": durable,
        "torch.load": time.perf_counter() - began,
    }


def _job(job: Job) -> dict[str, float]:
    began = time.perf_counter()
    handle = job.save()
    blocked = time.perf_counter() - began
    handle.wait()
    durable = time.perf_counter() - began
    settle()
    began = time.perf_counter()
    job.restore()
    memory = time.perf_counter() - began
    # As in a new process, which has no snapshot in memory: the checkpoint is read from disk.
    settle()
    buffers = job.checkpointer.session.pool.buffers
    kept = [buffer.snapshot for buffer in buffers]
    for buffer in buffers:
        buffer.snapshot = None
    began = time.perf_counter()
    job.restore()
    storage = time.perf_counter() - began
    for buffer, snapshot in zip(buffers, kept, strict=True):
        buffer.snapshot = snapshot
    return {
        "Job.save": blocked,
        "Job.save, durable": durable,
        "Job.restore, from memory": memory,
        "Job.restore, from disk": storage,
    }
