"""Resuming within an epoch, and the overhead of the loader over torch's own."""

from __future__ import annotations

import contextlib
import functools
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import outlast
from benchmarks.checkpoint.saves import disk_folder, in_ranks
from outlast.elastic import ElasticLoader, ElasticSampler

__all__ = ["loading", "position", "skipping"]


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


class _Stream(IterableDataset[torch.Tensor]):
    """The same images, which can only be read from the beginning."""

    def __init__(self, data: _Data) -> None:
        self._data, self._length = data, len(data)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self._data[i] for i in range(self._length))


def skipping(batches: int, batch: int, rounds: int) -> dict[str, Any]:
    """Seconds until the first batch after a restore within an epoch, after `batches` batches."""
    print("elastic: skipping what is done", flush=True)
    found: dict[str, Any] = in_ranks(
        "elastic-skipping", 1, lambda _: _skipping(batches, batch, rounds)
    )[0]
    return {"batches": batches, "batch": batch, "seconds": found}


def _skipping(batches: int, batch: int, rounds: int) -> dict[str, list[float]]:
    data = _Data(2 * batches * batch)
    ways: dict[str, Callable[[], Any]] = {
        "ElasticLoader": lambda: ElasticLoader(data, global_batch_size=batch),
        "DataLoader": lambda: DataLoader(data, batch, shuffle=True),
        "DataLoader, IterableDataset": lambda: DataLoader(_Stream(data), batch),
    }
    seconds: dict[str, list[float]] = {}
    with disk_folder() as folder:
        for way, make in ways.items():
            path = str(folder / way)
            _to_first_batch(path, make(), batches)
            seconds[way] = [_to_first_batch(path, make(), 0) for _ in range(rounds)]
    return seconds


def _to_first_batch(path: str, loader: Any, stop: int) -> float:
    """Continues a job; returns the seconds from the restored state to the first batch. With `stop`,
    the job trains on this number of batches, and saves.
    """
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = loader if isinstance(loader, ElasticLoader) else None
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": own}
    took = 0.0
    with contextlib.suppress(_Enough), outlast.Job(path, **parts, every=None, signals=()) as job:
        job.restore()
        for _ in job.epochs(1):
            began = time.perf_counter()
            for number, _ in enumerate(job.batches(loader), 1):
                took = took or time.perf_counter() - began
                if number == stop:
                    job.step()
                    job.save().wait()
                if number >= stop:
                    raise _Enough
    return took


class _Enough(Exception):
    """Leaves a job within an epoch, as a fault does."""


def _through(make: Callable[[int], Iterator[Any]], workers: int) -> None:
    for _ in make(workers):
        pass


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
