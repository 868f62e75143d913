"""Rank filters: the lowest ranks are active, all ranks agree, and filters compose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inprocess.view_strategies import state_of
from outlast.errors import RestartAbort
from outlast.inprocess.compose import Compose
from outlast.inprocess.rank_filter import MaxActiveWorldSize, RankFilter, WorldSizeDivisibleBy
from outlast.inprocess.state import Status

sizes = st.integers(1, 16)


def active_size(rank_filter: Callable[..., Any], size: int) -> int:
    """The number of active ranks; checks that the states of all ranks agree."""
    states = [rank_filter(state_of(rank, size)) for rank in range(size)]
    (active,) = {state.active_world_size for state in states}
    for rank, state in enumerate(states):
        assert (state.rank, state.world_size) == (rank, size)
        assert state.status is (Status.INITIALIZED if rank < active else Status.INACTIVE)
        assert state.active == (rank < active)
    return int(active)


@given(sizes, st.none() | sizes)
def test_at_most_so_many_are_active(size: int, limit: int | None) -> None:
    assert active_size(MaxActiveWorldSize(limit), size) == min(size, limit or size)


@given(sizes, sizes)
def test_as_many_as_the_divisor_divides(size: int, divisor: int) -> None:
    rank_filter = WorldSizeDivisibleBy(divisor)
    if divisor > size:
        for rank in range(size):
            with pytest.raises(RestartAbort):
                rank_filter(state_of(rank, size))
        return
    active = active_size(rank_filter, size)
    assert active % divisor == 0
    assert size - divisor < active <= size


@given(sizes, sizes, st.integers(1, 4))
def test_each_works_on_what_it_is_given(size: int, limit: int, divisor: int) -> None:
    limit = max(limit, divisor)
    if size < divisor:
        return
    left = active_size(Compose(WorldSizeDivisibleBy(divisor), MaxActiveWorldSize(limit)), size)
    assert left == min(size, limit) // divisor * divisor
    right = active_size(Compose(MaxActiveWorldSize(limit), WorldSizeDivisibleBy(divisor)), size)
    assert right == min(size // divisor * divisor, limit)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_is_inactive_stays_so(rank: int) -> None:
    # Rank 0 was made inactive by another filter.
    state = state_of(rank, 8, active_world_size=2, status=Status.INACTIVE)
    for rank_filter in (MaxActiveWorldSize(), MaxActiveWorldSize(4), WorldSizeDivisibleBy(2)):
        after = rank_filter(state)
        assert (after.active_world_size, after.status) == (2, Status.INACTIVE)


def test_the_state_that_was_given_is_not_changed() -> None:
    state = state_of(3, 4)
    MaxActiveWorldSize(1)(state)
    assert state == state_of(3, 4)


def test_nobody_active_ends_the_job_and_says_why() -> None:
    with pytest.raises(RestartAbort, match=r"rank 1: .* size of 3 is below divisor=4"):
        WorldSizeDivisibleBy(4)(state_of(1, 3))


def test_the_defaults_leave_everyone_active() -> None:
    assert active_size(MaxActiveWorldSize(), 5) == active_size(WorldSizeDivisibleBy(), 5) == 5
    assert isinstance(Compose(MaxActiveWorldSize(), WorldSizeDivisibleBy()), RankFilter)


@pytest.mark.parametrize(
    ("value", "error"), [("1", TypeError), (2.0, TypeError), (True, TypeError), (0, ValueError)]
)
def test_wrong_arguments_are_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^max_active_world_size must be"):
        MaxActiveWorldSize(value)
    with pytest.raises(error, match=r"^divisor must be"):
        WorldSizeDivisibleBy(value)


def test_a_divisor_must_be_given() -> None:
    with pytest.raises(TypeError, match=r"^divisor must be an int, not None"):
        WorldSizeDivisibleBy(None)  # type: ignore[arg-type]
