"""The backoff of a rank that dies repeatedly: the policy alone, without a clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.launch.workers.worker_group import LONGEST_BACKOFF_S, SOON_S, backoff_s

LIFETIMES = st.lists(st.floats(0, 1e6), max_size=2000)


@pytest.mark.parametrize(
    ("lifetimes", "delay"),
    [
        ([], 0),
        ([0.1], 0),  # the first death costs nothing, however soon
        ([3600], 0),
        ([0.1, 0.1], 1),
        ([0.1, 9.9, 0.1], 2),
        ([0.1] * 4, 4),
        ([0.1] * 8, 60),
        ([0.1, 0.1, 10.0], 0),  # long enough: the row is over
        ([0.1, 0.1, 10.0, 0.1], 0),
        ([3600, 0.1, 0.1], 1),
    ],
)
def test_examples(lifetimes: list[float], delay: float) -> None:
    assert backoff_s(1.0, lifetimes) == delay


@given(LIFETIMES)
def test_it_is_never_longer_than_the_limit(lifetimes: list[float]) -> None:
    assert 0 <= backoff_s(1.0, lifetimes) <= LONGEST_BACKOFF_S


@given(LIFETIMES)
def test_another_early_death_never_shortens_it(lifetimes: list[float]) -> None:
    assert backoff_s(1.0, [*lifetimes, 0.0]) >= backoff_s(1.0, lifetimes)


@given(LIFETIMES)
def test_a_long_life_ends_the_row(lifetimes: list[float]) -> None:
    assert backoff_s(1.0, [*lifetimes, SOON_S]) == 0


def test_it_can_be_turned_off() -> None:
    assert backoff_s(0, [0.0] * 5000) == 0
