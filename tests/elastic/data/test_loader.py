"""`ElasticLoader`: samples count when they were trained on, not when they were fetched."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from outlast.elastic import ElasticLoader, ElasticSampler
from outlast.elastic.data.loader import rank_and_replicas


class Numbers(Dataset[int]):
    """Each sample is its own index."""

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def loader(length: int = 20, **options: Any) -> ElasticLoader:
    return ElasticLoader(Numbers(length), **{"global_batch_size": 6, "seed": 1, **options})


def order(length: int = 20, epoch: int = 0, **options: Any) -> list[int]:
    """The samples of an epoch, in order."""
    sampler = ElasticSampler(length, **{"global_batch_size": 6, "seed": 1, **options})
    sampler.epoch = epoch
    return [i for share in sampler.shares(0, 1) for part in share.indices for i in part]


@given(
    length=st.integers(1, 40),
    batch=st.integers(1, 12),
    max_batch=st.none() | st.integers(1, 5),
    stages=st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, 6), st.booleans()), min_size=1, max_size=4
    ),
)
def test_resuming_at_other_numbers_of_replicas(
    length: int, batch: int, max_batch: int | None, stages: list[tuple[int, int, bool]]
) -> None:
    state: dict[str, Any] | None = None
    found: list[int] = []
    for replicas, steps, says_done in stages:
        ranks = [
            loader(
                length,
                global_batch_size=batch,
                max_batch_size=max_batch,
                rank=rank,
                replicas=replicas,
            )
            for rank in range(replicas)
        ]
        states = []
        trained: list[list[list[int]]] = []
        for each in ranks:
            if state is not None:
                each.load_state_dict(state)
            trained.append(steps_of(each, steps, says_done))
            states.append(each.state_dict())
        assert all(s == states[0] for s in states)
        state = states[0]
        for shares in zip(*trained, strict=True):
            found += [i for share in shares for i in share]
    expected: list[int] = []
    epoch = 0
    while len(expected) < len(found):
        expected += order(length, epoch, global_batch_size=batch)
        epoch += 1
    assert found == expected[: len(found)]


def steps_of(loader: ElasticLoader, steps: int, says_done: bool) -> list[list[int]]:
    """The samples of the first global batches that count; then breaks out of the loop."""
    found: list[list[int]] = []
    share: list[int] = []
    while len(found) < steps:
        for data in loader:
            if loader.weight > 0:
                share += data.tolist()
            if loader.boundary:
                found.append(share)
                share = []
                if says_done:
                    loader.done()
                if len(found) == steps:
                    break
    return found


@pytest.fixture
def _child_handler() -> Iterator[None]:
    """torch's loader installs a SIGCHLD handler and never removes it."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("_child_handler")
@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_samples_do_not_count(workers: int) -> None:
    options: dict[str, Any] = {"num_workers": workers}
    if workers:
        options.update(prefetch_factor=4, multiprocessing_context="fork")
    each = loader(60, **options)
    seen: list[int] = []
    for number, data in enumerate(each):
        seen += data.tolist()
        if number == 2:
            break
    assert each.state_dict()["position"] == 18
    again = loader(60, **options)
    again.load_state_dict(each.state_dict())
    for data in again:
        seen += data.tolist()
    assert seen == order(60)
    assert (again.epoch, again.sampler.position) == (1, 0)


def test_a_batch_counts_at_the_next_one_or_after_done() -> None:
    each = loader()
    batches = iter(each)
    next(batches)
    assert each.sampler.position == 0
    next(batches)
    assert each.sampler.position == 6
    assert each.done() == 6
    assert each.sampler.position == 12
    assert each.done() == 0
    next(batches)
    assert each.sampler.position == 12
    assert each.state_dict()["position"] == 18, "saved after the optimizer's step"


def test_iterating_again_continues_at_the_next_batch() -> None:
    each = loader()
    seen: list[int] = []
    for _ in range(4):
        for data in each:
            seen += data.tolist()
            break
    assert seen == order()
    assert each.done() == 2
    assert each.epoch == 1


def test_an_incomplete_batch_does_not_count() -> None:
    each = loader(max_batch_size=2)
    first = []
    for data in each:
        first.append(data.tolist())
        if len(first) == 2:
            break
    assert each.state_dict()["position"] == 0
    assert [data.tolist() for data in each][:2] == first


def test_len_is_the_number_of_batches_of_a_whole_epoch() -> None:
    each = loader()
    assert len(each) == len(list(each)) == 4
    next(iter(each))
    each.done()
    assert len(each) == 4  # a framework asks once, maybe within a resumed epoch, for all epochs
    assert len(list(each)) == 3
    assert len(loader(drop_last=True)) == len(list(loader(drop_last=True)))


def test_an_iteration_ends_when_the_position_changes() -> None:
    each = loader()
    batches = iter(each)
    next(batches)
    each.load_state_dict({**each.state_dict(), "position": 12})
    with pytest.raises(RuntimeError, match="its state was loaded"):
        next(batches)
    assert each.sampler.position == 12
    first, second = iter(each), iter(each)
    next(first)
    next(second)
    with pytest.raises(RuntimeError, match="iterated again"):
        next(first)
    assert each.done() == 2, "the batch of the second iteration"


def test_the_global_generators_are_not_used() -> None:
    """A run that was stopped within an epoch creates one more torch loader."""
    before = torch.get_rng_state()
    for _ in loader():
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_worker_seeds_depend_on_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    for seed, position, rank in ((1, 0, 0), (1, 0, 0), (2, 0, 0), (1, 6, 0), (1, 0, 1)):
        each = loader(seed=seed, rank=rank, replicas=2)
        each.sampler.position = position
        seeds.append(each._generator().initial_seed())
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 4


def test_the_users_own_generator() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    next(iter(loader(generator=generator)))
    assert not torch.equal(generator.get_state(), before)


def test_a_data_set_whose_length_has_changed() -> None:
    each = loader(20)
    state = loader(21).state_dict()
    with pytest.raises(ValueError, match="length is 20, 21 was saved"):
        each.load_state_dict(state)


@pytest.mark.parametrize("name", ["batch_size", "sampler", "batch_sampler"])
def test_options_that_are_set_by_others(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        loader(**{name: 3})


def test_in_order_is_required() -> None:
    with pytest.raises(ValueError, match="in_order=False"):
        loader(num_workers=2, in_order=False)


def test_rank_and_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_and_replicas(None, None) == (0, 1)
    monkeypatch.setitem(os.environ, "RANK", "2")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "5")
    assert rank_and_replicas(None, None) == (2, 5)
    assert rank_and_replicas(1, 3) == (1, 3)
    for rank, replicas in ((None, 3), (1, None)):
        with pytest.raises(ValueError, match="both rank and replicas"):
            rank_and_replicas(rank, replicas)
    with pytest.raises(ValueError, match="below replicas=2"):
        rank_and_replicas(2, 2)
