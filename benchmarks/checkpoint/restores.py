"""The cost of a restore: from memory against a copy, from disk against a raw read with hashes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.checkpoint.libraries import LmResiliency, TorchCheckpointing, installed
from benchmarks.checkpoint.limits import (
    Reading,
    copy_time,
    drop_cache,
    hashed_copy_time,
    settle,
)
from benchmarks.checkpoint.training_state import Training
from outlast.async_checkpoint import Checkpointer
from outlast.events.event import Event
from outlast.events.types import CheckpointRestored

__all__ = ["restores"]

RAW = {"": False, ", O_DIRECT": True}
Restore = Callable[[dict[str, Any]], None]


class _Sources:
    """Records where each restore has found its checkpoint."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def write(self, event: Event) -> None:
        if isinstance(event, CheckpointRestored):
            self.found.append(event.source)

    def close(self) -> None:
        pass


class _Libraries:
    """A checkpoint of each library that is installed, and the functions that load it."""

    def __init__(self, folder: Path, job: Training) -> None:
        self._opened: list[TorchCheckpointing | LmResiliency] = []
        self.memory: dict[str, Restore] = {}
        self.disk: dict[str, tuple[Restore, list[Path]]] = {}
        rank = dist.get_rank()
        if installed("torch-checkpointing"):
            path = folder / "restored-torch-checkpointing"
            manager = TorchCheckpointing(path)
            manager.save(job.state_dict(), 1)()
            files = sorted(path.glob(f"1/*_{rank}.pt"))
            self.disk["torch-checkpointing load"] = (functools.partial(manager.load, 1), files)
            self._opened.append(manager)
        if installed("lm-resiliency"):
            path = folder / "restored-lm-resiliency"
            saved = LmResiliency(path, job)
            saved.save(job.state_dict(), 1)()
            self.memory["lm-resiliency load from memory"] = saved.load
            restarted = LmResiliency(path, job)
            files = sorted(path.rglob(f"rank-{rank}.pt"))
            self.disk["lm-resiliency load"] = (restarted.load, files)
            self._opened += [saved, restarted]

    def close(self) -> None:
        for each in reversed(self._opened):
            each.close()


def restores(
    folder: Path,
    job: Training,
    small: Training,
    tensors: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    threads: int,
    rounds: int,
) -> tuple[dict[str, dict[str, list[float]]], list[str]]:
    """Seconds of each kind of restore in each round, and the sources of `Checkpointer.restore`.
    `small` has as many tensors as `job`.
    """
    path, peer = folder / "restored", folder / "restored-peer"
    sources = _Sources()
    seconds: dict[str, dict[str, list[float]]] = {}

    def turn(name: str, measured: Callable[[], float], keep: bool) -> None:
        settle()
        dist.barrier()
        value = measured()
        if keep:
            seconds.setdefault(name, {}).setdefault("seconds", []).append(value)

    libraries = _Libraries(folder, job)
    # From memory, as after a restart in place; and of as many tensors that have few bytes, which is
    # what a restore costs whatever the size of the state.
    kept: dict[str, tuple[Path, Training, _Sources | None]] = {
        "restore from memory": (path, job, sources),
        "restore from memory, few bytes": (folder / "restored-small", small, None),
    }
    opened: dict[str, Checkpointer] = {}
    for name, (at, of, events) in kept.items():
        opened[name] = Checkpointer(at, events=events)
        opened[name].save(1, of.state_dict()).wait()
    for number in range(rounds + 1):
        turn("memcpy back", functools.partial(copy_time, buffers, tensors), number > 0)
        hashed = functools.partial(hashed_copy_time, buffers, tensors)
        turn("memcpy back with checksums", hashed, number > 0)
        for name, (at, of, events) in kept.items():
            opened[name].abort()
            dist.barrier()
            opened[name] = Checkpointer(at, events=events)
            turn(name, functools.partial(_restore, opened[name], of), number > 0)
        for name, restore in libraries.memory.items():
            turn(name, functools.partial(_load, restore, job), number > 0)
    for each in opened.values():
        each.close()

    save(job.state_dict(), checkpoint_id=peer)
    dist.barrier()
    rank = dist.get_rank()
    files = sorted(path.glob(f"step-*/__{rank}_[0-9]*"))
    dcp: Restore = functools.partial(load, checkpoint_id=peer)
    loads = {"dcp.load": (dcp, sorted(peer.glob(f"__{rank}_*"))), **libraries.disk}
    reading = Reading(files, threads)
    checkpointer = Checkpointer(path, events=sources)
    for number in range(rounds + 1):
        for cold in (True, False):
            kind = "cold" if cold else "warm"
            for name, direct in RAW.items():
                if cold or not direct:
                    turn(
                        f"raw read with checksums{name}, {kind}",
                        functools.partial(reading.time, cold=cold, direct=direct),
                        number > 0,
                    )
            drop_cache(files if cold else [])
            turn(
                f"restore from disk, {kind}",
                functools.partial(_restore, checkpointer, job),
                number > 0,
            )
            for name, (restore, its_files) in loads.items():
                drop_cache(its_files if cold else [])
                turn(f"{name}, {kind}", functools.partial(_load, restore, job), number > 0)
    checkpointer.close()
    libraries.close()
    return seconds, sources.found


def _restore(checkpointer: Checkpointer, job: Training) -> float:
    state = job.state_dict()
    began = time.perf_counter()
    if checkpointer.restore(state) != 1:
        raise RuntimeError("the checkpoint was not found")
    return time.perf_counter() - began


def _load(restore: Restore, job: Training) -> float:
    state: dict[str, Any] = job.state_dict()
    began = time.perf_counter()
    restore(state)
    return time.perf_counter() - began
