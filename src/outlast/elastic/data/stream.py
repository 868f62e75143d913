"""Iterable data, exactly once: shards that are read from where the training has got to.

Data that can only be read in order comes in shards (files, say). Each shard belongs to one replica
at a time, which remembers how many of its items were trained on. When the number of replicas
changes, the shards are dealt out again, each with its offset: every item of an epoch is trained on
once. Their order depends on the number of replicas; where that must not be, use a map-style data
set and `ElasticLoader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from outlast.elastic.data.loader import place_of

__all__ = ["ShardedStream"]


class ShardedStream:
    """Batches of the items of this replica's shards.

    All replicas go through as many batches, since each has a collective: when a replica has no
    items left and others have, it gets its last items again with `weight` 0.

    Args:
        shards: names of the shards; the same on all replicas and in every run.
        read: gives the items of a shard, from an offset on: `read(shard, offset)`.
        batch_size: items of a batch, of one replica.
        collate: makes a batch of items; torch's own by default.
        rank: this replica's rank; of the default process group by default.
        replicas: the number of replicas; of the default process group by default.
        group: in which the replicas tell one another where they are.

    Attributes:
        weight: what to multiply the mean loss of the present batch by.
    """

    def __init__(
        self,
        shards: Sequence[str],
        read: Callable[[str, int], Iterable[Any]],
        *,
        batch_size: int,
        collate: Callable[[list[Any]], Any] = default_collate,
        rank: int | None = None,
        replicas: int | None = None,
        group: Any = None,
    ) -> None:
        if not shards or len(set(shards)) != len(shards):
            raise ValueError("shards are at least one, each with a name of its own")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        self.shards = list(shards)
        self.batch_size = batch_size
        self.rank, self.replicas = place_of(rank, replicas)
        self.epoch = 0
        self.weight = 1.0
        self._read = read
        self._collate = collate
        self._group = group
        self._offsets = torch.zeros(len(shards), dtype=torch.int64)
        self._handed_out: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[Any]:
        self.done()
        self._exchange()
        items = self._items(range(self.rank, len(self.shards), self.replicas))
        last: list[Any] = []
        while True:
            batch, marks = self._next_batch(items)
            counts = self._gathered(len(batch))
            total = sum(counts)
            if total == 0:
                break
            if batch:
                last = batch
            elif not last:
                last = [self._any_item()]
            # The mean over all items of this round, of DDP's mean over the replicas.
            self.weight = len(batch) * self.replicas / total
            self._handed_out = marks
            yield self._collate(batch or last)
            self.done()
        self.epoch += 1
        self._offsets.zero_()

    def done(self) -> None:
        """Says that the batch that was handed out last has been trained on."""
        marks, self._handed_out = self._handed_out, []
        for shard, offset in marks:
            self._offsets[shard] = offset

    def state_dict(self) -> dict[str, Any]:
        """Where the training is, of all replicas. A collective, where there are several."""
        self.done()
        self._exchange()
        return {"epoch": self.epoch, "shards": list(self.shards), "offsets": self._offsets.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there.

        Raises:
            ValueError: if the shards are others.
        """
        if list(state["shards"]) != self.shards:
            raise ValueError(
                f"the shards are others: {len(self.shards)} here, {len(state['shards'])} saved, "
                "or their names or order differ"
            )
        self.epoch = int(state["epoch"])
        self._offsets = torch.tensor(state["offsets"], dtype=torch.int64)
        self._handed_out = []

    def _items(self, shards: Sequence[int]) -> Iterator[tuple[int, int, Any]]:
        for shard in shards:
            offset = int(self._offsets[shard])
            for item in self._read(self.shards[shard], offset):
                offset += 1
                yield shard, offset, item

    def _next_batch(
        self, items: Iterator[tuple[int, int, Any]]
    ) -> tuple[list[Any], list[tuple[int, int]]]:
        batch, marks = [], []
        for shard, offset, item in items:
            batch.append(item)
            marks.append((shard, offset))
            if len(batch) == self.batch_size:
                break
        return batch, marks

    def _any_item(self) -> Any:
        """For a replica that never had an item, and must take part in the collectives."""
        for shard in self.shards:
            for item in self._read(shard, 0):
                return item
        raise ValueError("no shard has an item")

    def _several(self) -> bool:
        return self.replicas > 1 and dist.is_available() and dist.is_initialized()

    def _gathered(self, count: int) -> list[int]:
        if not self._several():
            return [count]
        mine = torch.tensor([count], device=_device(self._group))
        all_of_them = [torch.empty_like(mine) for _ in range(self.replicas)]
        dist.all_gather(all_of_them, mine, group=self._group)
        return [int(each.item()) for each in all_of_them]

    def _exchange(self) -> None:
        """Each shard has moved on with the replica that reads it: the greatest offset is right."""
        if self._several():
            offsets = self._offsets.to(_device(self._group))
            dist.all_reduce(offsets, op=dist.ReduceOp.MAX, group=self._group)
            self._offsets = offsets.cpu()


def _device(group: Any) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"
