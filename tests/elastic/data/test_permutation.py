"""`Permutation`: a bijection, computed element by element, and stable across versions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outlast.elastic.data.sampler import Permutation
from outlast.elastic.random_generators import mix64

KEYS = st.integers(-(2**70), 2**70)


@given(size=st.integers(1, 3000), key=KEYS)
def test_bijection(size: int, key: int) -> None:
    order = Permutation(size, key)(torch.arange(size))
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(size))


@given(size=st.integers(1, 10**12), key=KEYS, data=st.data())
def test_each_element_is_computed_alone(size: int, key: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    permutation = Permutation(size, key)
    together = permutation(torch.tensor(places)).tolist()
    assert [int(permutation(torch.tensor(place))) for place in places] == together
    assert len(set(together)) == len(places)
    assert all(0 <= value < size for value in together)


def test_shapes() -> None:
    permutation = Permutation(24, 1)
    square = permutation(torch.arange(24).view(2, 3, 4))
    assert square.shape == (2, 3, 4)
    assert square.flatten().tolist() == permutation(torch.arange(24)).tolist()
    assert permutation(torch.empty(0)).tolist() == []


def test_the_order_is_the_same_in_every_version() -> None:
    """A job resumes within an epoch with the order with which it started."""
    found = Permutation(10, 7)(torch.arange(10)).tolist()
    assert found == [2, 7, 6, 9, 8, 4, 3, 1, 0, 5]
    assert Permutation(10**8, 3)(torch.tensor([0, 1, 10**8 - 1])).tolist() == [
        83579230,
        3435824,
        25555182,
    ]
    assert mix64(0) == 0xE220A8397B1DCDAF, "the first output of splitmix64 with seed 0"


def test_each_key_gives_another_order() -> None:
    orders = {tuple(Permutation(20, key)(torch.arange(20)).tolist()) for key in range(200)}
    assert len(orders) == 200


@pytest.mark.parametrize("size", [2, 7, pytest.param(33, marks=pytest.mark.slow)])
def test_uniformity(size: int) -> None:
    """The position of a sample over many keys: a chi-squared test with a far tail."""
    count = 60 * size
    seen = torch.zeros(size)
    neighbours = 0
    for key in range(count):
        order = Permutation(size, key)(torch.arange(min(size, 2)))
        seen[order[0]] += 1
        neighbours += int(order[1] - order[0] == 1)
    chi_squared = float(((seen - 60) ** 2 / 60).sum())
    degrees = size - 1
    assert chi_squared < degrees + 6 * (2 * degrees) ** 0.5 + 10
    # The next sample follows it no more often than by chance.
    expected = count / size
    assert abs(neighbours - expected) < 6 * expected**0.5 + 10


def test_empty_and_negative_sizes() -> None:
    with pytest.raises(ValueError, match="size=-1 is negative"):
        Permutation(-1, 0)
    assert Permutation(0, 0)(torch.empty(0)).tolist() == []
