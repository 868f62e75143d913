"""The order of samples, the same for any number of replicas, and where the training is in it.

The global order of an epoch follows from the seed and the epoch alone. A global batch is the next
`global_batch_size` samples of it; each replica takes a stretch of every global batch. So a job
that comes back with another number of replicas goes on at the very next sample, and no sample of
an epoch is trained on twice or left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sized
from itertools import pairwise
from typing import Any

import torch

from outlast.elastic.data.permutation import Permutation

__all__ = ["ElasticSampler", "Share"]

_AT_ONCE = 4096  # places of a replica for which the order is computed together


@dataclasses.dataclass(frozen=True)
class Share:
    """What one replica takes of one global batch.

    Attributes:
        indices: of the samples, in parts: those that go through the model together.
        weights: for each part, what its *mean* loss is multiplied by, so that the gradients that
            DDP averages over the replicas, summed over the parts, are those of the mean over the
            global batch.
        samples: of the global batch.
        first: the number of the first part, among the `virtual_replicas` if there are any.
    """

    indices: list[list[int]]
    weights: list[float]
    samples: int
    first: int = 0


class ElasticSampler:
    """The global batches of one epoch after another, and this replica's share of each.

    Args:
        data: the data set (only its length is used), or its length.
        global_batch_size: samples that make one step of the optimizer, over all replicas.
        shuffle: whether the order is random; else it is that of the data set.
        seed: of the order.
        drop_last: whether the last batch of an epoch is left out where it is not full.
        max_batch_size: how many samples go through the model at once on a replica. A larger share
            comes in several parts, the gradients of which are accumulated.
        virtual_replicas: cut every global batch into this many parts, whatever the number of
            replicas (see `ConsistentDDP`).
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        global_batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        max_batch_size: int | None = None,
        virtual_replicas: int | None = None,
    ) -> None:
        self.length = data if isinstance(data, int) else len(data)
        for name, value in (
            ("global_batch_size", global_batch_size),
            ("max_batch_size", max_batch_size),
            ("virtual_replicas", virtual_replicas),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.length < 1:
            raise ValueError("the data set is empty")
        if drop_last and self.length < global_batch_size:
            raise ValueError(
                f"no batch is full: {self.length} samples, global_batch_size={global_batch_size}"
            )
        if virtual_replicas is not None and max_batch_size is not None:
            raise ValueError("virtual_replicas cut the batch already: leave max_batch_size out")
        self.global_batch_size = global_batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.max_batch_size = max_batch_size
        self.virtual_replicas = virtual_replicas
        self.epoch = 0
        self.position = 0

    @property
    def epoch_length(self) -> int:
        """Samples of an epoch."""
        if not self.drop_last:
            return self.length
        return self.length - self.length % self.global_batch_size

    def __len__(self) -> int:
        """Global batches that are left of the epoch."""
        return math.ceil((self.epoch_length - self.position) / self.global_batch_size)

    def shares(self, rank: int, replicas: int) -> Iterator[Share]:
        """This replica's shares of the global batches that are left of the epoch.

        Going through them does not move `position`: whoever trains on them does (`advance`).

        Raises:
            ValueError: if there are more replicas than `virtual_replicas`.
        """
        if self.virtual_replicas is not None and replicas > self.virtual_replicas:
            raise ValueError(
                f"{replicas} replicas, but virtual_replicas={self.virtual_replicas}: there is "
                "nothing to do for some"
            )
        order = Permutation(self.length, self.seed * 0x1_0000_0001 + self.epoch)
        end, batch = self.epoch_length, self.global_batch_size
        at_once = max(1, _AT_ONCE * replicas // batch)
        for first in range(self.position, end, at_once * batch):
            begins = range(first, min(first + at_once * batch, end), batch)
            plans = [
                _Plan(self, begin, min(batch, end - begin), rank, replicas) for begin in begins
            ]
            places = torch.cat([plan.places() for plan in plans])
            indices = (order(places) if self.shuffle else places).tolist()
            at = 0
            for plan in plans:
                yield plan.share(indices[at : at + plan.count])
                at += plan.count

    def advance(self, samples: int) -> None:
        """Says that `samples` more of the epoch have been trained on. At its end, the next epoch
        begins.
        """
        self.position += samples
        if self.position >= self.epoch_length:
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the training is."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there. The global batch size may be another one than before.

        Raises:
            ValueError: if the order would be another one: the length of the data set, the seed or
                `shuffle` differ; names them. Nothing is changed then.
        """
        own = self.state_dict()
        different = [
            f"{name} is {own[name]!r}, {state[name]!r} was saved"
            for name in ("length", "seed", "shuffle")
            if own[name] != state[name]
        ]
        if different:
            raise ValueError(
                "the samples would come in another order, so that some would be trained on twice "
                "and others not at all: " + "; ".join(different)
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        if self.position >= self.epoch_length:  # drop_last or the batch size has changed
            self.epoch, self.position = self.epoch + 1, 0


class _Plan:
    """Which places of a global batch are a replica's, in which parts."""

    def __init__(
        self, sampler: ElasticSampler, begin: int, size: int, rank: int, replicas: int
    ) -> None:
        self._begin, self._size = begin, size
        self._first = 0
        if sampler.virtual_replicas is not None:
            cuts = _cuts(size, sampler.virtual_replicas)
            self._first, last = _stretch(sampler.virtual_replicas, rank, replicas)
            self._cuts = cuts[self._first : last + 1]
            share = 1  # summed, not averaged, over the replicas
        else:
            low, high = _stretch(size, rank, replicas)
            count = 1
            if sampler.max_batch_size is not None:
                # As many parts on every replica: each has a collective of its own.
                count = math.ceil(math.ceil(size / replicas) / sampler.max_batch_size)
            self._cuts = [low + cut for cut in _cuts(high - low, count)]
            share = replicas
        self._weights = [(end - start) * share / size for start, end in pairwise(self._cuts)]
        self.count = 1 + self._cuts[-1] - self._cuts[0]

    def places(self) -> torch.Tensor:
        """In the order of the epoch; the first one is to spare."""
        low, high = self._begin + self._cuts[0], self._begin + self._cuts[-1]
        return torch.cat([torch.tensor([self._begin]), torch.arange(low, high)])

    def share(self, indices: list[int]) -> Share:
        """With the samples that stand at these places."""
        spare, *mine = indices
        low = self._cuts[0]
        # A replica that has nothing to train on in this batch, or in a part of it, must still take
        # part in its collectives: with a sample that counts nothing.
        parts = [mine[a - low : b - low] or [spare] for a, b in pairwise(self._cuts)]
        return Share(parts, self._weights, self._size, self._first)


def _cuts(size: int, parts: int) -> list[int]:
    """Where `size` things are cut into `parts` of nearly equal size, the ends too."""
    return [i * size // parts for i in range(parts + 1)]


def _stretch(size: int, rank: int, replicas: int) -> tuple[int, int]:
    return rank * size // replicas, (rank + 1) * size // replicas
