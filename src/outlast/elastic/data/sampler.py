"""The order of samples, the same for any number of replicas, and the position in it.

The global order of an epoch depends only on the seed and the epoch. Each global batch consists of
the next `global_batch_size` samples; each replica takes a contiguous share of it. So a job that
resumes with another number of replicas continues at the next sample, and each sample of an epoch is
trained on exactly once.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterator, Sized
from itertools import islice, pairwise
from typing import Any

import torch

from outlast.elastic.random_generators import mix64
from outlast.system.arguments import as_int

_ROUNDS = 6  # of a permutation
_LOOKAHEAD = 4096  # samples of a replica whose indices are computed together


@dataclasses.dataclass(frozen=True)
class Share:
    """One replica's share of one global batch, in parts, each of which goes through the model at
    once. The weight of a part is the factor of its *mean* loss: the gradients that DDP averages
    over the replicas, summed over the parts, are then those of the mean loss over the global batch.
    """

    indices: list[list[int]]  # of the samples of each part
    weights: list[float]
    samples: int  # of the global batch
    begins: list[int]  # for each part, the position of its first sample in the epoch
    first: int = 0  # the number of the first part, among the `virtual_replicas` if there are any


class ElasticSampler:
    """Divides each epoch into global batches, and each global batch among the replicas.

    Args:
        data: the dataset (only its length is used), or its length.
        global_batch_size: the number of samples per optimizer step, over all replicas.
        shuffle: whether the order is random; otherwise it is the dataset's order.
        drop_last: whether to drop the last batch of an epoch if it is not full.
        max_batch_size: the maximum number of samples that go through the model together on a
            replica. A larger share is split into parts, for gradient accumulation.
        virtual_replicas: split every global batch into this many parts, regardless of the number
            of replicas (see `ConsistentDDP`).
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
        length = data if isinstance(data, numbers.Integral) else len(data)  # type: ignore[arg-type]
        self.length = as_int("the length of the dataset", length)
        if self.length < 1:
            raise ValueError("the dataset is empty")
        self.global_batch_size = as_int("global_batch_size", global_batch_size, at_least=1)
        if max_batch_size is not None:
            max_batch_size = as_int("max_batch_size", max_batch_size, at_least=1)
        if virtual_replicas is not None:
            virtual_replicas = as_int("virtual_replicas", virtual_replicas, at_least=1)
        if drop_last and self.length < global_batch_size:
            raise ValueError(
                f"no batch is full: {self.length} samples, global_batch_size={global_batch_size}"
            )
        if virtual_replicas is not None and max_batch_size is not None:
            raise ValueError(
                "virtual_replicas already split the batch: max_batch_size is not allowed"
            )
        self.shuffle, self.drop_last, self.seed = shuffle, drop_last, as_int("seed", seed)
        self.max_batch_size, self.virtual_replicas = max_batch_size, virtual_replicas
        self.epoch = self.position = 0

    @property
    def epoch_length(self) -> int:
        """The number of samples of an epoch."""
        if not self.drop_last:
            return self.length
        return self.length - self.length % self.global_batch_size

    def __len__(self) -> int:
        """The number of global batches left in the epoch."""
        return math.ceil((self.epoch_length - self.position) / self.global_batch_size)

    def shares(self, rank: int, replicas: int) -> Iterator[Share]:
        """This replica's shares of the global batches left in the epoch.

        Iterating does not change `position`: call `advance` after training on a batch.

        Raises:
            ValueError: if there are more replicas than `virtual_replicas`.
        """
        if self.virtual_replicas is not None and replicas > self.virtual_replicas:
            raise ValueError(
                f"{replicas} replicas, but virtual_replicas={self.virtual_replicas}: some "
                "replicas would have no part"
            )
        order = Permutation(self.length, self.seed * 0x1_0000_0001 + self.epoch)
        end, batch = self.epoch_length, self.global_batch_size
        lookahead = max(1, _LOOKAHEAD * replicas // batch) * batch
        for first in range(self.position, end, lookahead):
            plans = [
                (begin, size, *self._parts(size, rank, replicas))
                for begin in range(first, min(first + lookahead, end), batch)
                for size in [min(batch, end - begin)]
            ]
            # A replica without samples in a batch, or in a part of it, must still take part in the
            # collectives: with a filler sample of weight 0, the first of the batch.
            positions = torch.cat(
                [
                    torch.tensor([begin, *range(begin + cuts[0], begin + cuts[-1])])
                    for begin, _, cuts, *_ in plans
                ]
            )
            indices = iter((order(positions) if self.shuffle else positions).tolist())
            for begin, size, cuts, number, factor in plans:
                filler, low = next(indices), cuts[0]
                own = list(islice(indices, cuts[-1] - low))
                yield Share(
                    [own[a - low : b - low] or [filler] for a, b in pairwise(cuts)],
                    [(b - a) * factor / size for a, b in pairwise(cuts)],
                    size,
                    [begin + cut for cut in cuts[:-1]],
                    number,
                )

    def _parts(self, size: int, rank: int, replicas: int) -> tuple[list[int], int, int]:
        """A replica's parts of a global batch: bounds, number of the first among all, weight."""
        if self.virtual_replicas is not None:
            first, last = bounds(self.virtual_replicas, rank, replicas)
            # Gradients are summed, not averaged, over the replicas.
            return _cuts(size, self.virtual_replicas)[first : last + 1], first, 1
        low, high = bounds(size, rank, replicas)
        count = 1
        if self.max_batch_size is not None:
            # The same number of parts on every replica: each part has a collective.
            count = math.ceil(math.ceil(size / replicas) / self.max_batch_size)
        return [low + cut for cut in _cuts(high - low, count)], 0, replicas

    def advance(self, samples: int) -> None:
        """Records that `samples` more were trained on. At the end of an epoch, the next begins."""
        self.position += samples
        if self.position >= self.epoch_length:
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, and the values that determine the order."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "global_batch_size": self.global_batch_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved position. The global batch size may differ.

        Raises:
            ValueError: if the length of the dataset, the seed or `shuffle` differs, and with it
                the order; names the differences. The sampler is then unchanged.
        """
        own = self.state_dict()
        different = [
            f"{name} is {own[name]!r}, {state[name]!r} was saved"
            for name in ("length", "seed", "shuffle")
            if own[name] != state[name]
        ]
        if different:
            raise ValueError(
                "the order of samples differs from the saved one, so some would be repeated and "
                "others skipped: " + "; ".join(different)
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        if self.position >= self.epoch_length:  # drop_last or the batch size differs
            self.epoch, self.position = self.epoch + 1, 0


def _cuts(size: int, parts: int) -> list[int]:
    """The bounds of `parts` nearly equal parts of `size` elements, both ends included."""
    return [i * size // parts for i in range(parts + 1)]


def bounds(size: int, rank: int, replicas: int) -> tuple[int, int]:
    """The bounds of one replica's part of `size` elements."""
    return rank * size // replicas, (rank + 1) * size // replicas


class Permutation:
    """A random permutation of the numbers below `size`, selected by the integer `key`. It needs no
    memory: each element is computed on demand.

    A Feistel network turns a key into a permutation of the numbers of k bits (Luby and Rackoff,
    "How to construct pseudorandom permutations from pseudorandom functions", 1988). Outputs of
    `size` or more are passed through it again until they are below it ("cycle walking": Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002). As 2^k is below twice the size, that
    takes less than two passes on average. So the order of 100 million samples is available at once,
    from any position.
    """

    def __init__(self, size: int, key: int) -> None:
        if size < 0:
            raise ValueError(f"size={size} is negative")
        self.size = size
        bits = max(size - 1, 1).bit_length()
        # The halves are swapped after each round; the number of rounds is even.
        self._left_bits, self._right_bits = bits // 2, bits - bits // 2
        self._keys = [mix64(key * _ROUNDS + i) >> 1 for i in range(_ROUNDS)]

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """The elements at these positions: int64, below `size`, of any shape."""
        values = self._encrypt(positions.to(torch.int64))
        flat = values.view(-1)
        while len(outside := (flat >= self.size).nonzero().view(-1)):
            flat[outside] = self._encrypt(flat[outside])
        return values

    def _encrypt(self, values: torch.Tensor) -> torch.Tensor:
        bits, others = self._left_bits, self._right_bits
        left, right = values >> others, values & ((1 << others) - 1)
        for key in self._keys:
            left, right = right, left ^ (_hash(right + key) & ((1 << bits) - 1))
            bits, others = others, bits
        return (left << others) | right


def _hash(values: torch.Tensor) -> torch.Tensor:
    """A hash of each value. Products wrap around; a shift that keeps the sign is as good."""
    values = (values ^ (values >> 33)) * -0x00AE502812AA7333  # murmur3's 64-bit finalizer
    values = (values ^ (values >> 33)) * -0x3B314601E57A13AD
    return values ^ (values >> 33)
