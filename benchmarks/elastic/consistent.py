"""`ConsistentDDP` against DDP with the same global batch, alternately in the same processes.

DDP processes each replica's share of the batch in one pass. The other row of DDP splits it into as
many parts as `ConsistentDDP` has, and synchronizes the gradients after the last part. The
difference to that row is the cost of bit-identical results.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from benchmarks.checkpoint.saves import in_ranks
from outlast.elastic import ConsistentDDP, ElasticLoader

__all__ = ["BATCH", "measure"]

BATCH = 32
_TOKENS = 32
_DIM = 256


def measure(
    layers: int, virtual: Sequence[int], sizes: Sequence[int], steps: int, rounds: int
) -> dict[str, Any]:
    """Seconds per step of the slowest rank.

    Args:
        layers: the number of layers of the transformer.
        virtual: the numbers of virtual replicas.
        sizes: the numbers of ranks.
        steps: the number of steps of a segment.
        rounds: the number of segments.
    """
    found = []
    for ranks in sizes:
        print(f"elastic: ConsistentDDP on {ranks} ranks", flush=True)
        work = functools.partial(_rank, layers, virtual, steps, rounds)
        parts = in_ranks("elastic-consistent", ranks, work)
        seconds = {
            name: [max(each) for each in zip(*(p["seconds"][name] for p in parts), strict=True)]
            for name in parts[0]["seconds"]
        }
        weights = {name: {p["weights"][name] for p in parts} for name in parts[0]["weights"]}
        found.append(
            {
                "ranks": ranks,
                "gradient_bytes": parts[0]["gradient_bytes"],
                "seconds": seconds,
                "weights": {name: sorted(each) for name, each in weights.items()},
            }
        )
    return {"runs": found, "virtual": list(virtual)}


class _Data(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((_TOKENS, _DIM), (index % 97) / 97)


class _Training:
    """The training job of one way, which continues from segment to segment."""

    def __init__(self, layers: int, virtual: int | None, parts: int | None) -> None:
        torch.manual_seed(0)
        module = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(
                _DIM, 8, 4 * _DIM, dropout=0.1, batch_first=True, norm_first=True
            ),
            layers,
            enable_nested_tensor=False,
        )
        self.module = module
        self.model: Any
        if virtual is not None:
            self.model = ConsistentDDP(module, virtual)
        else:
            self.model = DistributedDataParallel(module)
        self.optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        replicas = dist.get_world_size()
        self.loader = ElasticLoader(
            _Data(),
            global_batch_size=BATCH,
            virtual_replicas=virtual,
            max_batch_size=None if parts is None else max(1, BATCH // max(parts, replicas)),
        )
        self._consistent = virtual is not None
        self._batches = iter(self.loader)

    def segment(self, steps: int) -> float:
        """Seconds per step."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self._step()
        return (time.perf_counter() - began) / steps

    def _step(self) -> None:
        loader = self.loader
        for data in self._batches:
            if self._consistent:
                with self.model.part(loader):
                    self.model(data).square().mean().backward()
            else:
                held = contextlib.nullcontext() if loader.boundary else self.model.no_sync()
                with held:
                    (loader.weight * self.model(data).square().mean()).backward()
            if loader.boundary:
                break
        self.optimizer.step()
        if not self._consistent:
            self.optimizer.zero_grad()


def _rank(
    layers: int, virtual: Sequence[int], steps: int, rounds: int, slot: int
) -> dict[str, Any]:
    ways: dict[str, Callable[[], _Training]] = {"DDP": lambda: _Training(layers, None, None)}
    for count in virtual:
        ways[f"DDP, {count} parts"] = functools.partial(_Training, layers, None, count)
        ways[f"ConsistentDDP, {count} parts"] = functools.partial(_Training, layers, count, None)
    trainings = {name: make() for name, make in ways.items()}
    # Bit-identical results need the same number of threads at any size.
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name in list(trainings)[:: 1 if number % 2 else -1]:
            took = trainings[name].segment(steps)
            if number:
                seconds.setdefault(name, []).append(took)
    parameters = list(trainings["DDP"].module.parameters())
    return {
        "gradient_bytes": sum(p.nbytes for p in parameters),
        "seconds": seconds,
        "weights": {name: _digest(each.module) for name, each in trainings.items()},
    }


def _digest(module: nn.Module) -> str:
    import hashlib

    content = hashlib.sha256()
    for tensor in module.state_dict().values():
        content.update(tensor.numpy().tobytes())
    return content.hexdigest()[:16]
