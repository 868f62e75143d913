"""Resharding from N to M ranks: `Checkpointer` against torch.distributed.checkpoint."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.checkpoint.limits import settle
from benchmarks.checkpoint.saves import in_ranks
from benchmarks.checkpoint.training_state import Size, Training
from benchmarks.lib.rank_processes import FOLDER
from outlast.async_checkpoint import Checkpointer

__all__ = ["measure"]


def measure(size: Size, pairs: Sequence[tuple[int, int]], rounds: int) -> list[dict[str, Any]]:
    """Seconds of a load on the slowest rank, alternately, for each pair of sizes."""
    found = []
    for before, after in pairs:
        print(f"elastic: resharding {before} to {after}", flush=True)
        folder = (FOLDER / f"resharding-{before}-{after}").absolute()
        shutil.rmtree(folder, ignore_errors=True)
        try:
            in_ranks("elastic-reshard", before, functools.partial(_save, size, folder))
            parts = in_ranks(
                "elastic-reshard",
                after,
                functools.partial(_load, size, after, folder, rounds),
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        seconds = {
            name: [max(each) for each in zip(*(p["seconds"][name] for p in parts), strict=True)]
            for name in parts[0]["seconds"]
        }
        total = sum(part["size_bytes"] for part in parts)
        found.append({"before": before, "after": after, "size_bytes": total, "seconds": seconds})
    return found


def _state(job: Training, parts: int) -> dict[str, Any]:
    """The model's tensors as shards of tensors that are the same for any number of ranks."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (parts,))
    state: dict[str, Any] = {}
    for number, tensor in enumerate(job.tensors()):
        if tensor.dim() and tensor.shape[0] % 4 == 0:
            rows = tensor.shape[0] // parts
            mine = tensor[dist.get_rank() * rows :][:rows].clone()
            state[str(number)] = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
    return state


def _save(size: Size, folder: Path, slot: int) -> None:
    del slot
    state = _state(Training(size), dist.get_world_size())
    with Checkpointer(folder / "ours") as checkpointer:
        checkpointer.save(1, state)
    save(state, checkpoint_id=folder / "dcp")


def _load(size: Size, after: int, folder: Path, rounds: int, slot: int) -> dict[str, Any]:
    del slot
    state = _state(Training(size), after)
    seconds: dict[str, list[float]] = {}
    with Checkpointer(folder / "ours") as checkpointer:
        turns: dict[str, Callable[[], Any]] = {
            "Checkpointer.restore": lambda: checkpointer.restore(state),
            "dcp.load": lambda: load(state, checkpoint_id=folder / "dcp"),
        }
        for number in range(rounds + 1):
            for name in list(turns)[:: 1 if number % 2 else -1]:
                settle()
                dist.barrier()
                began = time.perf_counter()
                turns[name]()
                if number:
                    seconds.setdefault(name, []).append(time.perf_counter() - began)
    size_bytes = sum(t.to_local().nbytes for t in state.values())
    return {"seconds": seconds, "size_bytes": size_bytes}
