"""A data loader that knows what was trained on, and goes on there with any number of replicas.

    loader = ElasticLoader(dataset, global_batch_size=96, num_workers=4)
    for epoch in range(loader.epoch, 10):
        for images, labels in loader:
            (loader.weight * loss_fn(model(images), labels)).backward()
            if loader.boundary:
                optimizer.step()
                optimizer.zero_grad()

The samples are fetched by torch's own `DataLoader`. Its worker processes fetch ahead; what they
have fetched and nobody has trained on does not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from outlast.elastic import environment
from outlast.elastic.data.permutation import mixed
from outlast.elastic.data.sampler import ElasticSampler, Share

__all__ = ["ElasticLoader", "place_of"]


def place_of(rank: int | None, replicas: int | None) -> tuple[int, int]:
    """This replica's rank and the number of replicas: as given, or of the process group, or as the
    environment says.

    Raises:
        ValueError: if only one is given, or they do not fit together.
    """
    if (rank is None) != (replicas is None):
        raise ValueError("rank and replicas are given together, or neither")
    if rank is None or replicas is None:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return environment.replica_rank(), environment.num_replicas()
    if not 0 <= rank < replicas:
        raise ValueError(f"rank={rank} must be at least 0 and below replicas={replicas}")
    return rank, replicas


class ElasticLoader:
    """This replica's share of every global batch of a map-style data set.

    Iterating goes through what is left of the present epoch; the next iteration begins the next
    one. A share comes in several parts where `max_batch_size` or `virtual_replicas` say so:
    `boundary` tells when a global batch is complete, and the optimizer is to step.

    A global batch counts as trained on when its last part was handed out and the loop has asked
    for more, or `done` was called (`Job.step` does), or a state is saved: so save after the
    optimizer's step.

    Args:
        dataset: with `__len__` and `__getitem__`.
        global_batch_size: see `ElasticSampler`.
        shuffle: see `ElasticSampler`.
        seed: see `ElasticSampler`.
        drop_last: see `ElasticSampler`.
        max_batch_size: see `ElasticSampler`.
        virtual_replicas: see `ElasticSampler`.
        rank: this replica's rank; of the default process group by default.
        replicas: the number of replicas; of the default process group by default.
        options: for torch's `DataLoader`: `num_workers`, `collate_fn`, `pin_memory`, ...

    Attributes:
        sampler: the position in the data.
        weight: of the present part: what to multiply its mean loss by.
        boundary: whether the present part is the last of a global batch.
        part: the number of the present part, among the `virtual_replicas` if there are any.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        global_batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        max_batch_size: int | None = None,
        virtual_replicas: int | None = None,
        rank: int | None = None,
        replicas: int | None = None,
        **options: Any,
    ) -> None:
        refused = {"batch_size", "sampler", "batch_sampler"} & set(options)
        if refused:
            raise ValueError(f"{sorted(refused)} follow from global_batch_size and the replicas")
        if options.get("in_order") is False:
            raise ValueError("in_order=False: batches would be taken for others")
        self.sampler = ElasticSampler(
            dataset,  # type: ignore[arg-type]  # a data set of torch has a length, or says so
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            max_batch_size=max_batch_size,
            virtual_replicas=virtual_replicas,
        )
        self.rank, self.replicas = place_of(rank, replicas)
        self.weight = 1.0
        self.boundary = False
        self.part = 0
        self._dataset = dataset
        self._options = options
        self._handed_out = 0
        self._run = 0

    @property
    def epoch(self) -> int:
        """The present epoch, from 0 on."""
        return self.sampler.epoch

    def __len__(self) -> int:
        """Global batches that are left of the present epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self.done()
        self._run += 1
        run = self._run
        fetched: deque[tuple[Share, int]] = deque()
        options = {"generator": self._generator(), **self._options}
        batches = DataLoader(self._dataset, batch_sampler=_Parts(self, fetched), **options)
        for data in batches:
            if run != self._run:
                raise RuntimeError("the loader was iterated again, or given another position")
            share, part = fetched.popleft()
            self.weight = share.weights[part]
            self.part = share.first + part
            self.boundary = part == len(share.weights) - 1
            self._handed_out = share.samples if self.boundary else 0
            yield data
            if run == self._run:
                self.done()

    def _generator(self) -> torch.Generator:
        """What torch's loader takes the seed of its worker processes from. By default it takes a
        number from the generator of the training, which would then give others to a training that
        was stopped in the middle of an epoch than to one that was not.
        """
        sampler = self.sampler
        place = mixed(mixed(sampler.seed * 0x1_0000_0001 + sampler.epoch) + sampler.position)
        return torch.Generator().manual_seed(mixed(place + self.rank) >> 1)

    def done(self) -> int:
        """Says that the global batch that was handed out last has been trained on; returns how
        many samples that are, over all replicas: none, if it was said before.
        """
        samples, self._handed_out = self._handed_out, 0
        if samples:
            self.sampler.advance(samples)
        return samples

    def state_dict(self) -> dict[str, Any]:
        """Where the training is. The same on all replicas."""
        self.done()
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there; see `ElasticSampler.load_state_dict`."""
        self.sampler.load_state_dict(state)
        self._handed_out = 0
        self._run += 1  # an iteration that is under way has fetched from another place


class _Parts:
    """What torch's loader takes its batches from: the indices of one part after another."""

    def __init__(self, loader: ElasticLoader, fetched: deque[tuple[Share, int]]) -> None:
        self._loader = loader
        self._fetched = fetched

    def __iter__(self) -> Iterator[list[int]]:
        loader = self._loader
        for share in loader.sampler.shares(loader.rank, loader.replicas):
            for part, indices in enumerate(share.indices):
                self._fetched.append((share, part))
                yield indices
