"""The order of samples, the same for any number of replicas, and where the training is in it.

The global order of an epoch follows from the seed and the epoch alone. A global batch is the next
`global_batch_size` samples of it; each replica takes a stretch of every global batch. So a job
that comes back with another number of replicas goes on at the very next sample, and no sample of
an epoch is trained on twice or left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sized
from typing import Any

import torch

from outlast.elastic.permutation import Permutation

__all__ = ["ElasticSampler", "Share"]


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
        for begin in range(self.position, self.epoch_length, self.global_batch_size):
            size = min(self.global_batch_size, self.epoch_length - begin)
            yield self._share(order, begin, size, rank, replicas)

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

    def _share(self, order: Permutation, begin: int, size: int, rank: int, replicas: int) -> Share:
        first = 0
        if self.virtual_replicas is not None:
            cuts = _cuts(size, self.virtual_replicas)
            first, last = _stretch(self.virtual_replicas, rank, replicas)
            parts = [(cuts[v], cuts[v + 1]) for v in range(first, last)]
            # Summed, not averaged, over the replicas: the weight is the part's of the batch.
            weights = [(high - low) / size for low, high in parts]
        else:
            low, high = _stretch(size, rank, replicas)
            count = 1
            if self.max_batch_size is not None:
                # As many parts on every replica: each has a collective of its own.
                largest = math.ceil(size / replicas)
                count = math.ceil(largest / self.max_batch_size)
            cuts = [low + cut for cut in _cuts(high - low, count)]
            parts = list(itertools.pairwise(cuts))
            weights = [(end - start) * replicas / size for start, end in parts]
        indices = []
        for start, end in parts:
            # A replica that has nothing to train on in this batch must still take part in its
            # collectives: with a sample that counts nothing.
            places = torch.arange(start, end) if end > start else torch.tensor([0])
            places = places + begin
            indices.append((order(places) if self.shuffle else places).tolist())
        return Share(indices, weights, size, first)


def _cuts(size: int, parts: int) -> list[int]:
    """Where `size` things are cut into `parts` of nearly equal size, the ends too."""
    return [i * size // parts for i in range(parts + 1)]


def _stretch(size: int, rank: int, replicas: int) -> tuple[int, int]:
    return rank * size // replicas, (rank + 1) * size // replicas
