"""Rank assignments: dense ranks, equal sizes, kept order, marked groups, discarded ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inprocess.view_strategies import Marks, sizes_with_gaps, state_of
from outlast.errors import RankDiscarded, RestartError
from outlast.inprocess.compose import Compose, iter_parts
from outlast.inprocess.rank_assignment import (
    AwaitReplacements,
    FillGaps,
    FilterGroupedByKey,
    RankAssignment,
    ShiftRanks,
)

World = tuple[int, frozenset[int]]
both = pytest.mark.parametrize("policy", [ShiftRanks(), FillGaps()])


def assign(policy: Callable[..., Any], world: World) -> dict[int, int]:
    """The new rank of each rank that stays; checks the invariants of all policies."""
    size, terminated = world
    new: dict[int, int] = {}
    sizes = set()
    for rank in range(size):
        if rank in terminated:
            with pytest.raises(RankDiscarded):
                policy(state_of(rank, size), terminated)
            continue
        try:
            state, unhandled = policy(state_of(rank, size, store=object()), terminated)
        except RankDiscarded:
            continue
        assert unhandled == frozenset()
        assert (state.initial_rank, state.initial_world_size) == (rank, size)
        assert state.active_world_size == state.world_size
        new[rank] = state.rank
        sizes.add(state.world_size)
    assert sorted(new.values()) == [*range(len(new))]
    assert sizes <= {len(new)}
    return new


@both
@given(sizes_with_gaps())
def test_ranks_are_dense_sizes_equal_and_only_the_terminated_are_discarded(
    policy: RankAssignment, world: World
) -> None:
    size, terminated = world
    assert assign(policy, world).keys() == {*range(size)} - terminated


@given(sizes_with_gaps())
def test_shift_ranks_keeps_the_order(world: World) -> None:
    new = assign(ShiftRanks(), world)
    assert [new[rank] for rank in sorted(new)] == [*range(len(new))]


@given(sizes_with_gaps())
def test_fill_gaps_moves_only_ranks_that_have_no_place_any_more(world: World) -> None:
    new = assign(FillGaps(), world)
    for rank, place in new.items():
        assert (place == rank) == (rank < len(new))
    moved = [new[rank] for rank in sorted(new) if new[rank] != rank]
    assert moved == sorted(moved)


@both
@given(size=st.integers(1, 12))
def test_with_no_gap_nobody_moves(policy: RankAssignment, size: int) -> None:
    assert assign(policy, (size, frozenset())) == {rank: rank for rank in range(size)}


def test_examples_that_can_be_checked_by_eye() -> None:
    world = (8, frozenset({1, 2, 6}))
    assert assign(ShiftRanks(), world) == {0: 0, 3: 1, 4: 2, 5: 3, 7: 4}
    assert assign(FillGaps(), world) == {0: 0, 3: 3, 4: 4, 5: 1, 7: 2}


def test_without_a_job_fill_gaps_returns_what_nvidia_resiliency_ext_does() -> None:
    gone = {1, 4, 5}
    found = {r: FillGaps()(state_of(r, 8), gone)[0].rank for r in range(8) if r not in gone}
    assert found == {0: 0, 2: 2, 3: 3, 6: 4, 7: 5}
    assert assign(FillGaps(), (8, frozenset(gone))) == {0: 0, 2: 2, 3: 3, 6: 1, 7: 4}


@both
def test_the_state_that_was_given_is_not_changed(policy: RankAssignment) -> None:
    state = state_of(3, 4)
    policy(state, frozenset({0}))
    assert state == state_of(3, 4)


@both
def test_a_rank_that_is_discarded_is_told_why(policy: RankAssignment) -> None:
    state = state_of(3, 4, initial_rank=5, iteration=2)
    with pytest.raises(RankDiscarded) as e:
        policy(state, frozenset({3, 1}))
    assert str(e.value) == (
        "rank 3 (initial rank 5) is left out of iteration 2 by "
        f"{type(policy).__name__}: it is one of the terminated ranks [1, 3]"
    )
    assert isinstance(e.value, RestartError)


@both
@pytest.mark.parametrize("rank", [-1, 4])
def test_terminated_ranks_are_ranks(policy: RankAssignment, rank: int) -> None:
    with pytest.raises(ValueError, match=rf"terminated_ranks: \[{rank}\] are not ranks of "):
        policy(state_of(0, 4), frozenset({rank, 2}))


# -- groups by a function ---------------------------------------------------------------------


def by(width: int) -> Callable[[int, int], int]:
    return lambda rank, size: rank // width


@given(sizes_with_gaps(), st.integers(1, 4), st.integers(0, 5))
def test_groups_that_fail_are_marked_whole(world: World, width: int, least: int) -> None:
    size, terminated = world
    marks = Marks(by(width), lambda count: count >= least)
    healthy = {rank for rank in range(size) if rank not in terminated}
    groups = {g: {r for r in healthy if r // width == g} for g in range(size)}
    failed = {rank for group in groups.values() if len(group) < least for rank in group}
    for rank in healthy:
        state = state_of(rank, size)
        assert marks(state, terminated) == (state, terminated | failed)
    for policy in (ShiftRanks(), FillGaps()):
        assert assign(Compose(policy, marks), world).keys() == healthy - failed


def test_the_function_is_asked_for_healthy_ranks_with_the_size_before() -> None:
    asked: list[tuple[int, int]] = []

    def key(rank: int, size: int) -> str:
        asked.append((rank, size))
        return "all"

    FilterGroupedByKey(key, lambda count: True)(state_of(3, 4), frozenset({1}))
    assert asked == [(0, 4), (2, 4), (3, 4)]


def test_the_condition_is_asked_once_a_group() -> None:
    asked: list[int] = []

    def condition(count: int) -> bool:
        asked.append(count)
        return True

    FilterGroupedByKey(by(4), condition)(state_of(0, 8), frozenset({1}))
    assert asked == [3, 4]


def test_a_rank_of_a_failed_group_is_told_so() -> None:
    policy = Compose(ShiftRanks(), FilterGroupedByKey(by(2), lambda count: count == 2))
    with pytest.raises(RankDiscarded, match=r"rank 2 .* ShiftRanks: its group '1' has 1 healthy"):
        policy(state_of(2, 4), frozenset({3}))


def test_reasons_of_an_earlier_filter_are_kept() -> None:
    # Nodes of two; racks of four, which need both nodes. Rank 3 is lost, so rank 2 falls with
    # its node, and then ranks 0 and 1 with their rack.
    nodes = Marks(by(2), lambda count: count == 2)
    racks = Marks(lambda rank, size: f"rack {rank // 4}", lambda count: count == 4)
    policy = Compose(ShiftRanks(), racks, nodes)
    assert assign(policy, (8, frozenset({3}))) == {4: 0, 5: 1, 6: 2, 7: 3}
    with pytest.raises(RankDiscarded, match="its group '1' has 1 healthy"):
        policy(state_of(2, 8), frozenset({3}))
    with pytest.raises(RankDiscarded, match="its group 'rack 0' has 2 healthy"):
        policy(state_of(0, 8), frozenset({3}))
    _, marked = Compose(racks, nodes)(state_of(4, 8), frozenset({3}))
    with pytest.raises(RankDiscarded, match="its group '1' has 1 healthy"):
        ShiftRanks()(state_of(2, 8), marked)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("condition", True, TypeError),
        ("timeout", "60", TypeError),
        ("timeout", timedelta(0), ValueError),
    ],
)
def test_wrong_arguments_are_named(name: str, value: Any, error: type[Exception]) -> None:
    arguments: dict[str, Any] = {"key_or_fn": "key", "condition": bool, name: value}
    with pytest.raises(error, match=f"^{name} must be"):
        FilterGroupedByKey(**arguments)


def test_without_a_store_a_key_is_of_no_use() -> None:
    with pytest.raises(ValueError, match=re.escape("state.store is None")):
        FilterGroupedByKey("key", bool)(state_of(0, 1), frozenset())


# -- AwaitReplacements ----------------------------------------------------------------------


@given(sizes_with_gaps())
def test_await_replacements_changes_nothing(world: World) -> None:
    size, terminated = world
    state = state_of(size - 1, size)
    assert AwaitReplacements(timedelta(seconds=1))(state, terminated) == (state, terminated)


def test_it_is_found_in_a_composition_with_its_timeout() -> None:
    waits = AwaitReplacements(timedelta(seconds=9))
    (found,) = (
        part
        for part in iter_parts(Compose(ShiftRanks(), Compose(waits, FillGaps())))
        if isinstance(part, AwaitReplacements)
    )
    assert found.timeout == timedelta(seconds=9)


def test_it_needs_a_timeout() -> None:
    with pytest.raises(
        TypeError, match=r"^timeout must be a number of seconds or a timedelta, not '9'"
    ):
        AwaitReplacements("9")  # type: ignore[arg-type]
    assert AwaitReplacements(9).timeout == timedelta(seconds=9)
