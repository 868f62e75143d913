"""Iterable data, each item exactly once: shards, each read from the offset reached by training.

Data that can only be read in order is split into shards, such as files. Each shard belongs to one
replica at a time, which records how many of its items were trained on. When the number of replicas
changes, the shards are redistributed with their offsets: every item of an epoch is trained on once.
The order depends on the number of replicas; for an order that does not, use a map-style data set
and `ElasticLoader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from outlast.coordination.collectives import device_of
from outlast.elastic.data.loader import rank_and_replicas, warn_if_changed
from outlast.system.arguments import as_int


class ShardedStream:
    """Batches of the items of this replica's shards.

    All replicas yield the same number of batches, since each batch has a collective: a replica that
    runs out of items before the others yields its last batch again, with `weight` 0.

    Args:
        shards: names of the shards; the same on all replicas and in every run.
        read: `read(shard, offset)` returns the items of a shard, starting at an offset.
        batch_size: the number of items in a batch of one replica.
        collate: makes a batch of a list of items; torch's `default_collate` by default.
        rank: this replica's rank; by default that in the default process group.
        replicas: the number of replicas; by default the size of the default process group.
        group: the process group in which the replicas exchange their offsets.

    Attributes:
        weight: the factor of the mean loss of the current batch.
        trained: the number of items, over all replicas, that were trained on since this object was
            created.
        holds_epoch: whether an epoch of which all items are trained on lasts until `begin_epoch`:
            iterating then yields nothing. `Job.epochs` sets it.
        at_end: whether this is so.
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
            raise ValueError("shards must be at least one, with unique names")
        self.shards = list(shards)
        self.batch_size = as_int("batch_size", batch_size, at_least=1)
        self.rank, self.replicas = rank_and_replicas(rank, replicas)
        self.epoch, self.weight, self.trained = 0, 1.0, 0
        self.holds_epoch = self.at_end = False
        self._read, self._collate, self._group = read, collate, group
        self._offsets = torch.zeros(len(shards), dtype=torch.int64)
        self._handed_out: list[tuple[int, int]] = []
        self._handed_out_count = 0  # of items, over all replicas

    def __iter__(self) -> Iterator[Any]:
        self.done()
        self._exchange()
        items = self._items(range(self.rank, len(self.shards), self.replicas))
        last: list[Any] = []
        while True:
            taken = list(islice(items, self.batch_size))
            batch = [item for _, _, item in taken]
            counts = self._gather(len(batch))
            total = sum(counts)
            if total == 0:
                break
            if batch:
                last = batch
            elif not last:
                last = [self._any_item()]
            # Makes DDP's mean over the replicas the mean over all items of these batches.
            self.weight = len(batch) * self.replicas / total
            self._handed_out = [(shard, offset) for shard, offset, _ in taken]
            self._handed_out_count = total
            yield self._collate(batch or last)
            self.done()
        self.at_end = True
        if not self.holds_epoch:
            self.begin_epoch(self.epoch + 1)

    def begin_epoch(self, epoch: int) -> None:
        """Goes to the beginning of this epoch, unless it has begun."""
        self.done()
        if epoch != self.epoch:
            self.epoch, self.at_end = epoch, False
            self._offsets.zero_()

    def resume_epoch(self, epoch: int) -> None:
        """Stays in this epoch, of which a state was loaded."""

    def done(self) -> int:
        """Records that the last batch was trained on. Returns its number of items over all
        replicas, or 0 if already recorded.
        """
        offsets, self._handed_out = self._handed_out, []
        count, self._handed_out_count = self._handed_out_count, 0
        for shard, offset in offsets:
            self._offsets[shard] = offset
        self.trained += count
        return count

    def state_dict(self) -> dict[str, Any]:
        """The position of all replicas. A collective, if there are several."""
        self.done()
        self._exchange()
        return self.own_state_dict()

    def own_state_dict(self) -> dict[str, Any]:
        """As after `done`, but not a collective: other replicas' offsets may be old."""
        offsets = self._offsets.tolist()
        for shard, offset in self._handed_out:
            offsets[shard] = offset
        return {
            "epoch": self.epoch,
            "shards": list(self.shards),
            "offsets": offsets,
            "global_batch_size": self.batch_size * self.replicas,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved position. Logs a warning on rank 0 if the replicas together had
        another batch size.

        Raises:
            ValueError: if the shards differ.
        """
        if list(state["shards"]) != self.shards:
            pairs = enumerate(zip_longest(self.shards, state["shards"]))
            number, now, saved = next((i, *pair) for i, pair in pairs if pair[0] != pair[1])
            raise ValueError(
                f"the shards differ: {len(self.shards)} here, {len(state['shards'])} saved; "
                f"number {number} is {now!r} here, {saved!r} saved"
            )
        self.epoch, self.at_end = int(state["epoch"]), False
        self._offsets = torch.tensor(state["offsets"], dtype=torch.int64)
        self._handed_out, self._handed_out_count = [], 0
        place = f"item {int(self._offsets.sum())} of epoch {self.epoch}"
        warn_if_changed(self.batch_size * self.replicas, state, rank=self.rank, place=place)

    def _items(self, shards: Sequence[int]) -> Iterator[tuple[int, int, Any]]:
        for shard in shards:
            offset = int(self._offsets[shard])
            for item in self._read(self.shards[shard], offset):
                offset += 1
                yield shard, offset, item

    def _any_item(self) -> Any:
        """An item for a replica that has none left, but must take part in the collectives."""
        for shard in self.shards:
            for item in self._read(shard, 0):
                return item
        raise ValueError("no shard has an item")

    def _is_distributed(self) -> bool:
        return self.replicas > 1 and dist.is_available() and dist.is_initialized()

    def _gather(self, count: int) -> list[int]:
        if not self._is_distributed():
            return [count]
        own = torch.tensor([count], device=device_of(self._group))
        gathered = [torch.empty_like(own) for _ in range(self.replicas)]
        dist.all_gather(gathered, own, group=self._group)
        return [int(each.item()) for each in gathered]

    def _exchange(self) -> None:
        """Only the replica that reads a shard advances its offset: the greatest one is current."""
        if self._is_distributed():
            offsets = self._offsets.to(device_of(self._group))
            dist.all_reduce(offsets, op=dist.ReduceOp.MAX, group=self._group)
            self._offsets = offsets.cpu()
