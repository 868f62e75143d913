"""`ElasticSampler`: each sample once per epoch, in one order, at any number of replicas."""

from __future__ import annotations

import dataclasses
import itertools
import math
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.elastic import ElasticSampler
from outlast.elastic.data.sampler import Share


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run whose size changes: the numbers of replicas and of steps of each stage."""

    length: int
    batch: int
    drop_last: bool
    shuffle: bool
    seed: int
    max_batch: int | None
    virtual: int | None
    stages: list[tuple[int, int]]

    def sampler(self) -> ElasticSampler:
        return ElasticSampler(
            self.length,
            global_batch_size=self.batch,
            shuffle=self.shuffle,
            seed=self.seed,
            drop_last=self.drop_last,
            max_batch_size=self.max_batch,
            virtual_replicas=self.virtual,
        )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    length = draw(st.integers(1, 40))
    drop_last = draw(st.booleans())
    batch = draw(st.integers(1, length if drop_last else 45))
    virtual = draw(st.none() | st.integers(1, 8))
    return Plan(
        length=length,
        batch=batch,
        drop_last=drop_last,
        shuffle=draw(st.booleans()),
        seed=draw(st.integers(-5, 5)),
        max_batch=None if virtual is not None else draw(st.none() | st.integers(1, 20)),
        virtual=virtual,
        stages=draw(
            st.lists(
                st.tuples(st.integers(1, min(6, virtual or 6)), st.integers(0, 8)),
                min_size=1,
                max_size=5,
            )
        ),
    )


def trained_on(share: Share) -> list[int]:
    """The samples with a weight above 0."""
    counting = zip(share.indices, share.weights, strict=True)
    return [index for part, weight in counting if weight > 0 for index in part]


def batches(plan: Plan) -> Iterator[tuple[int, list[Share]]]:
    """The epoch and the shares of all replicas, step by step, over all stages."""
    saved = plan.sampler().state_dict()
    for replicas, steps in plan.stages:
        samplers = [plan.sampler() for _ in range(replicas)]
        for sampler in samplers:
            sampler.load_state_dict(saved)
        done = 0
        while done < steps:
            epoch = samplers[0].epoch
            everyone = [s.shares(rank, replicas) for rank, s in enumerate(samplers)]
            left = min(steps - done, len(samplers[0]))
            for shares in itertools.islice(zip(*everyone, strict=True), left):
                yield epoch, list(shares)
                for sampler in samplers:
                    sampler.advance(shares[0].samples)
            done += left
        states = [sampler.state_dict() for sampler in samplers]
        assert all(state == states[0] for state in states)
        saved = states[0]


@given(plans())
def test_each_sample_once_per_epoch_in_the_same_order_at_any_size(plan: Plan) -> None:
    found = [(epoch, [i for s in shares for i in trained_on(s)]) for epoch, shares in batches(plan)]
    alone = dataclasses.replace(plan, stages=[(1, len(found))])
    assert found == [(epoch, trained_on(shares[0])) for epoch, shares in batches(alone)]
    epochs: dict[int, list[int]] = {}
    for epoch, indices in found:
        epochs.setdefault(epoch, []).extend(indices)
    length = plan.sampler().epoch_length
    for epoch, indices in epochs.items():
        assert len(set(indices)) == len(indices)
        assert set(indices) <= set(range(plan.length))
        if epoch != max(epochs):
            assert len(indices) == length


@given(plans())
def test_weights_give_the_mean_over_the_global_batch(plan: Plan) -> None:
    for _, shares in batches(plan):
        (samples,) = {share.samples for share in shares}
        total = 0
        for share in shares:
            for indices, weight in zip(share.indices, share.weights, strict=True):
                # DDP averages over the replicas; `ConsistentDDP` sums the parts.
                averaged = weight if plan.virtual is not None else weight / len(shares)
                if weight > 0:
                    total += len(indices)
                    assert averaged / len(indices) == pytest.approx(1 / samples)
        assert total == samples


@given(plans())
def test_all_replicas_have_the_same_number_of_parts(plan: Plan) -> None:
    for _, shares in batches(plan):
        for share in shares:
            assert len(share.indices) == len(share.weights)
            assert all(share.indices), "each part needs a sample"
            if plan.max_batch is not None:
                assert max(map(len, share.indices)) <= plan.max_batch
        if plan.virtual is None:
            assert len({len(share.indices) for share in shares}) == 1
        else:
            first = [share.first for share in shares]
            ends = [share.first + len(share.indices) for share in shares]
            assert [*first, plan.virtual] == [0, *ends]


@given(plans(), st.integers(1, 8))
def test_the_parts_of_virtual_replicas_are_the_same_at_any_size(plan: Plan, virtual: int) -> None:
    plan = dataclasses.replace(plan, virtual=virtual, max_batch=None)
    sampler = plan.sampler()
    for replicas in range(1, min(virtual, 6) + 1):
        each = (sampler.shares(rank, replicas) for rank in range(replicas))
        for one, *several in zip(sampler.shares(0, 1), *each, strict=True):
            assert one.indices == [part for share in several for part in share.indices]
            assert one.weights == [weight for share in several for weight in share.weights]


def test_a_batch_smaller_than_the_number_of_replicas() -> None:
    sampler = ElasticSampler(5, global_batch_size=2, shuffle=False)
    steps = list(zip(*(sampler.shares(rank, 4) for rank in range(4)), strict=True))
    assert [[trained_on(share) for share in shares] for shares in steps] == [
        [[], [0], [], [1]],
        [[], [2], [], [3]],
        [[], [], [], [4]],
    ]
    assert [share.weights for share in steps[0]] == [[0.0], [2.0], [0.0], [2.0]]


def test_resuming_within_a_hundred_million_samples_needs_no_memory() -> None:
    sampler = ElasticSampler(10**8, global_batch_size=4096)
    state = {**sampler.state_dict(), "position": 4096 * 20_000, "epoch": 3}
    tracemalloc.start()
    try:
        sampler.load_state_dict(state)
        share = next(sampler.shares(5, 8))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(share.indices[0]) == 512
    assert peak < 1 << 20
    assert len(sampler) == math.ceil(10**8 / 4096) - 20_000


def test_resuming_with_another_global_batch_size() -> None:
    before = ElasticSampler(50, global_batch_size=8, seed=3)
    for share in itertools.islice(before.shares(0, 1), 2):
        before.advance(share.samples)
    after = ElasticSampler(50, global_batch_size=5, seed=3)
    after.load_state_dict(before.state_dict())
    assert after.position == 16
    assert [i for s in after.shares(0, 1) for i in trained_on(s)] == [
        i for s in before.shares(0, 1) for i in trained_on(s)
    ]


def test_a_position_in_the_dropped_batch_is_the_end_of_the_epoch() -> None:
    before = ElasticSampler(50, global_batch_size=4)
    before.advance(48)
    after = ElasticSampler(50, global_batch_size=20, drop_last=True)
    after.load_state_dict(before.state_dict())
    assert (after.epoch, after.position) == (1, 0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"length": 51}, "length is 50, 51 was saved"),
        ({"seed": 4}, "seed is 3, 4 was saved"),
        ({"shuffle": False}, "shuffle is True, False was saved"),
    ],
)
def test_a_state_of_another_order_is_refused(other: dict[str, object], message: str) -> None:
    sampler = ElasticSampler(50, global_batch_size=8, seed=3)
    sampler.advance(8)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict({**before, "position": 40, "epoch": 2, **other})
    assert sampler.state_dict() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size must be at least 1"),
        ({"global_batch_size": 4, "max_batch_size": 0}, "max_batch_size must be at least 1, not 0"),
        (
            {"global_batch_size": 4, "virtual_replicas": 0},
            "virtual_replicas must be at least 1, not 0",
        ),
        ({"global_batch_size": 11, "drop_last": True}, "no batch is full: 10 samples"),
        (
            {"global_batch_size": 4, "virtual_replicas": 2, "max_batch_size": 2},
            "max_batch_size is not allowed",
        ),
    ],
)
def test_invalid_options(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ElasticSampler(10, **options)


def test_empty_data_and_too_many_replicas() -> None:
    with pytest.raises(ValueError, match="empty"):
        ElasticSampler(0, global_batch_size=1)
    sampler = ElasticSampler(range(10), global_batch_size=4, virtual_replicas=2)
    with pytest.raises(ValueError, match="3 replicas, but virtual_replicas=2"):
        next(sampler.shares(0, 3))
