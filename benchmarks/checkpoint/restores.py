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

from benchmarks.checkpoint.limits import Reading, copy_time, drop_cache, settle
from benchmarks.checkpoint.training_state import Training
from outlast.async_checkpoint import Checkpointer
from outlast.events.event import Event
from outlast.events.types import CheckpointRestored

__all__ = ["restores"]

RAW = {"": False, ", O_DIRECT": True}


class _Sources:
    """Records where each restore has found its checkpoint."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def write(self, event: Event) -> None:
        if isinstance(event, CheckpointRestored):
            self.found.append(event.source)

    def close(self) -> None:
        pass


def restores(
    folder: Path,
    job: Training,
    tensors: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    threads: int,
    rounds: int,
) -> tuple[dict[str, dict[str, list[float]]], list[str]]:
    """Seconds of each kind of restore in each round, and the sources of `Checkpointer.restore`."""
    path, peer = folder / "restored", folder / "restored-peer"
    sources = _Sources()
    seconds: dict[str, dict[str, list[float]]] = {}

    def turn(name: str, measured: Callable[[], float], keep: bool) -> None:
        settle()
        dist.barrier()
        value = measured()
        if keep:
            seconds.setdefault(name, {}).setdefault("seconds", []).append(value)

    # From memory, as after a restart in place.
    checkpointer = Checkpointer(path, events=sources)
    checkpointer.save(1, job.state_dict()).wait()
    for number in range(rounds + 1):
        turn("memcpy back", functools.partial(copy_time, buffers, tensors), number > 0)
        checkpointer.abort()
        dist.barrier()
        checkpointer = Checkpointer(path, events=sources)
        turn("restore from memory", functools.partial(_restore, checkpointer, job), number > 0)
    checkpointer.close()

    save(job.state_dict(), checkpoint_id=peer)
    dist.barrier()
    rank = dist.get_rank()
    files = sorted(path.glob(f"step-*/__{rank}_[0-9]*"))
    peer_files = sorted(peer.glob(f"__{rank}_*"))
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
            drop_cache(peer_files if cold else [])
            turn(f"dcp.load, {kind}", functools.partial(_load, peer, job), number > 0)
    checkpointer.close()
    return seconds, sources.found


def _restore(checkpointer: Checkpointer, job: Training) -> float:
    state = job.state_dict()
    began = time.perf_counter()
    if checkpointer.restore(state) != 1:
        raise RuntimeError("the checkpoint was not found")
    return time.perf_counter() - began


def _load(path: Path, job: Training) -> float:
    state: dict[str, Any] = job.state_dict()
    began = time.perf_counter()
    load(state, checkpoint_id=path)
    return time.perf_counter() - began
