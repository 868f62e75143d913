"""`ShardedStream`: each item once per epoch, at any number of replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outlast.elastic import ShardedStream

Items = dict[str, list[int]]


class Replicas:
    """Streams of several replicas in one process: threads with simulated collectives."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.said: list[Any] = [None] * count
        self.barrier = threading.Barrier(count)

    def exchanged(self, rank: int, value: Any) -> list[Any]:
        self.said[rank] = value
        self.barrier.wait(60)
        everyone = list(self.said)
        self.barrier.wait(60)
        return everyone

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.count

        def call(rank: int) -> None:
            results[rank] = work(rank)

        threads = [threading.Thread(target=call, args=(r,)) for r in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class Together(ShardedStream):
    """A stream whose collectives connect threads."""

    def __init__(self, replicas: Replicas, rank: int, items: Items, batch_size: int) -> None:
        super().__init__(
            list(items),
            lambda shard, offset: items[shard][offset:],
            batch_size=batch_size,
            collate=list,
            rank=rank,
            replicas=replicas.count,
        )
        self._together = replicas

    def _gather(self, count: int) -> list[int]:
        return self._together.exchanged(self.rank, count)

    def _exchange(self) -> None:
        everyone = self._together.exchanged(self.rank, self._offsets)
        self._offsets = torch.stack(everyone).amax(0)


def made(lengths: list[int]) -> Items:
    numbers = iter(range(sum(lengths)))
    return {f"shard {i}": [next(numbers) for _ in range(n)] for i, n in enumerate(lengths)}


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any),
    batch_size=st.integers(1, 4),
    stages=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=5),
)
def test_each_item_once_per_epoch(
    lengths: list[int], batch_size: int, stages: list[tuple[int, int]]
) -> None:
    items = made(lengths)
    state: dict[str, Any] | None = None
    epochs: dict[int, list[int]] = {}
    for count, steps in stages:
        replicas = Replicas(count)

        def train(
            rank: int, replicas: Replicas = replicas, steps: int = steps, state: Any = state
        ) -> Any:
            stream = Together(replicas, rank, items, batch_size)
            if state is not None:
                stream.load_state_dict(state)
            found = []
            while len(found) < steps:
                epoch = stream.epoch
                for batch in stream:
                    found.append((epoch, stream.weight, batch))
                    if len(found) == steps:
                        break
            return found, stream.state_dict()

        results = replicas.run(train)
        assert all(saved == results[0][1] for _, saved in results)
        state = results[0][1]
        for round_of_all in zip(*(found for found, _ in results), strict=True):
            counted = [len(batch) for _, weight, batch in round_of_all if weight > 0]
            for epoch, weight, batch in round_of_all:
                assert batch, "an empty batch"
                if weight > 0:
                    epochs.setdefault(epoch, []).extend(batch)
                    assert weight / count / len(batch) == pytest.approx(1 / sum(counted))
    assert state is not None
    everything = list(range(sum(lengths)))
    for epoch, found in epochs.items():
        assert len(set(found)) == len(found)
        if epoch < max(epochs):
            assert sorted(found) == everything


def stream(**options: Any) -> ShardedStream:
    items = made([3, 2])
    return ShardedStream(
        list(items), lambda shard, offset: items[shard][offset:], **{"batch_size": 2, **options}
    )


def test_one_replica() -> None:
    each = stream()
    assert [batch.tolist() for batch in each] == [[0, 1], [2, 3], [4]]
    assert each.epoch == 1
    assert each.state_dict()["offsets"] == [0, 0]


def test_items_count_when_trained_on() -> None:
    each = stream()
    batches = iter(each)
    next(batches)
    assert each._offsets.tolist() == [0, 0]
    next(batches)
    assert each._offsets.tolist() == [2, 0]
    each.done()
    assert each._offsets.tolist() == [3, 1]
    again = stream()
    again.load_state_dict(each.state_dict())
    assert [batch.tolist() for batch in again] == [[4]]


def test_iterating_again_continues_at_the_next_item() -> None:
    each = stream()
    seen = []
    for _ in range(3):
        for batch in each:
            seen += batch.tolist()
            break
    assert seen == [0, 1, 2, 3, 4]


def test_shards_are_read_from_their_offset() -> None:
    asked = []

    def read(shard: str, offset: int) -> Iterator[int]:
        asked.append((shard, offset))
        return iter(range(offset, 4))

    each = ShardedStream(["a", "b"], read, batch_size=3)
    each.load_state_dict({"epoch": 4, "shards": ["a", "b"], "offsets": [4, 1]})
    assert [batch.tolist() for batch in each] == [[1, 2, 3]]
    assert asked == [("a", 4), ("b", 1)]
    assert each.epoch == 5


def test_a_state_of_other_shards_is_refused_and_nothing_is_changed() -> None:
    each = stream()
    before = each.state_dict()
    for shards, difference in (
        (["shard 0"], "1 is 'shard 1' here, None saved"),
        (["shard 1", "shard 0"], "0 is 'shard 0' here, 'shard 1' saved"),
        (["shard 0", "other"], "1 is 'shard 1' here, 'other' saved"),
    ):
        with pytest.raises(ValueError, match=f"the shards differ: 2 here.*; number {difference}"):
            each.load_state_dict({"epoch": 3, "shards": shards, "offsets": [1] * len(shards)})
    assert each.state_dict() == before


def test_invalid_options() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ShardedStream([], mock.Mock(), batch_size=1)
    with pytest.raises(ValueError, match="unique names"):
        ShardedStream(["a", "a"], mock.Mock(), batch_size=1)
    with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
        ShardedStream(["a"], mock.Mock(), batch_size=0)
