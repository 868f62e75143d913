"""Seeds that follow from a position in the data: also for a `DataLoader`'s workers.

torch seeds a worker when an iteration begins. What the worker draws for a batch, to augment its
samples, then depends on the batches that it has loaded before: a job that continues within an
epoch, in new workers, would draw other numbers. So the indices of each batch take a seed along to
the worker. It is set when they arrive there, which is right before their samples are loaded.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import get_worker_info

_MASK = (1 << 64) - 1


def mix64(value: int) -> int:
    """A 64-bit hash of an integer: the finalizer of splitmix64 (Steele, Lea and Flood, "Fast
    splittable pseudorandom number generators", 2014).
    """
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def has_worker_processes(options: Mapping[str, Any]) -> bool:
    """Whether a `DataLoader` with these options, or attributes, loads in other processes."""
    method = options.get("worker_method", "multiprocessing")
    return bool(options.get("num_workers")) and method == "multiprocessing"


class Seeded:
    """The indices of a batch, or of a sample, on their way to a worker, with the seed of the
    generators that load them. They arrive as they were given.
    """

    def __init__(self, indices: Any, seed: int) -> None:
        self._indices, self._seed = indices, seed

    def __reduce__(self) -> tuple[Callable[[Any, int], Any], tuple[Any, int]]:
        return _arrived, (self._indices, self._seed)


def _arrived(indices: Any, seed: int) -> Any:
    if get_worker_info() is not None:  # the generators that torch seeds, too
        random.seed(seed)
        torch.manual_seed(mix64(seed + 1) >> 1)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(mix64(seed + 2) >> 32)
    return indices
