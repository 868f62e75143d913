"""Resuming within an epoch, and the overhead of the loader over torch's own."""

from __future__ import annotations

import functools
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.checkpoint.saves import in_ranks
from outlast.elastic import ElasticLoader, ElasticSampler

__all__ = ["loading", "position"]


def position(length: int, rounds: int) -> dict[str, Any]:
    """Seconds until the first batch after resuming within an epoch, and the memory for it."""
    print(f"elastic: a position in {length:,} samples", flush=True)
    found: dict[str, Any] = in_ranks("elastic-position", 1, lambda _: _position(length, rounds))[0]
    return {"length": length, **found}


def _position(length: int, rounds: int) -> dict[str, Any]:
    batch = 4096
    state = ElasticSampler(length, global_batch_size=batch).state_dict()
    state["position"] = length // batch // 2 * batch
    _first(length, batch, state)
    before = _peak()
    ours = [_timed(functools.partial(_first, length, batch, state)) for _ in range(rounds)]
    grown = _peak() - before
    before = _peak()
    whole = functools.partial(_stored, length, batch, state)
    stored = [_timed(whole) for _ in range(min(rounds, 3))]
    return {
        "seconds": ours,
        "grown_bytes": grown,
        "stored_seconds": stored,
        "stored_bytes": _peak() - before,
    }


def _first(length: int, batch: int, state: dict[str, Any]) -> None:
    sampler = ElasticSampler(length, global_batch_size=batch)
    sampler.load_state_dict(state)
    next(sampler.shares(3, 8))


def _stored(length: int, batch: int, state: dict[str, Any]) -> None:
    """Computes the whole order at once, as torch's `DistributedSampler` does."""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(0))
    order[state["position"] : state["position"] + batch].tolist()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _Data(Dataset[torch.Tensor]):
    """Images of 3 x 32 x 32 in memory: the cheapest realistic samples."""

    def __init__(self, length: int) -> None:
        self._images = torch.zeros(512, 3, 32, 32)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._images[index % 512]


def loading(samples: int, batch: int, rounds: int) -> dict[str, Any]:
    """Seconds per batch over an epoch, alternately for torch's loader and for `ElasticLoader`."""
    print("elastic: the loader", flush=True)
    found: dict[str, Any] = in_ranks(
        "elastic-loader", 1, lambda _: _loading(samples, batch, rounds)
    )[0]
    return {"batch": batch, "seconds": found}


def _loading(samples: int, batch: int, rounds: int) -> dict[str, list[float]]:
    data = _Data(samples)
    ways: dict[str, Callable[[int], Iterator[Any]]] = {
        "DataLoader": lambda workers: iter(
            DataLoader(data, batch_size=batch, shuffle=True, num_workers=workers)
        ),
        "ElasticLoader": lambda workers: iter(
            ElasticLoader(data, global_batch_size=batch, num_workers=workers)
        ),
        "ElasticLoader, 4 parts": lambda workers: iter(
            ElasticLoader(
                data, global_batch_size=batch, max_batch_size=batch // 4, num_workers=workers
            )
        ),
    }
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            for workers in (0, 2):
                took = _timed(functools.partial(_through, ways[name], workers))
                if number:
                    seconds.setdefault(f"{name}, {workers} workers", []).append(
                        took / (samples // batch)
                    )
    return seconds


def _through(make: Callable[[int], Iterator[Any]], workers: int) -> None:
    for _ in make(workers):
        pass


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
