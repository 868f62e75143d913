"""From the end of an iteration to the ranks of the next one, without processes."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inprocess.view_strategies import Marks, ViewChange, state_of, states_in_view, view_changes
from outlast.coordination.decision import (
    Decision,
    Joiner,
    ViewRecord,
    decide,
    decode_record,
    encode_record,
)
from outlast.errors import RankDiscarded, RestartAbort, RestartError
from outlast.inprocess.compose import Compose
from outlast.inprocess.rank_assignment import (
    AwaitReplacements,
    FillGaps,
    FilterGroupedByKey,
    RankAssignment,
    ShiftRanks,
)
from outlast.inprocess.rank_filter import MaxActiveWorldSize, RankFilter, WorldSizeDivisibleBy
from outlast.inprocess.recovery.next_ranks import state_in_view
from outlast.inprocess.state import State, Status


class Leaves(RankAssignment):
    def __call__(self, state: State, terminated_ranks: Any) -> Any:
        return state, terminated_ranks


# -- the view: slots of members, before the rank assignment ----------------------------------


@given(view_changes())
def test_no_member_has_two_places_and_no_lost_one_has_any(change: ViewChange) -> None:
    members = [m for m in change.record.slots() if m is not None]
    assert len(members) == len(set(members))
    assert not change.lost & set(members)


@given(view_changes())
def test_survivors_keep_their_places(change: ViewChange) -> None:
    slots = change.record.slots()
    for rank, member in change.survivors.items():
        assert slots[rank] == member


@given(view_changes())
def test_every_newcomer_has_a_place_and_nobody_else(change: ViewChange) -> None:
    members = {m for m in change.record.slots() if m is not None}
    assert members == {*change.survivors.values(), *(j.member for j in change.newcomers)}
    assert members == change.record.expected


@given(view_changes())
def test_places_are_added_only_when_all_are_taken(change: ViewChange) -> None:
    slots = change.record.slots()
    assert len(slots) >= change.world_size
    if len(slots) > change.world_size:
        assert None not in slots


@given(view_changes())
def test_a_newcomer_has_the_empty_place_it_asks_for_unless_another_was_first(
    change: ViewChange,
) -> None:
    slots = change.record.slots()
    asked: set[int] = set()
    for joiner in change.newcomers:
        empty = joiner.preferred not in change.survivors
        if 0 <= joiner.preferred < change.world_size and empty and joiner.preferred not in asked:
            assert slots[joiner.preferred] == joiner.member
        asked.add(joiner.preferred)


@given(view_changes())
def test_a_record_comes_back_from_the_store_as_it_was(change: ViewChange) -> None:
    decision = Decision(change.record)
    assert decode_record(encode_record(decision)) == decision


def test_the_replacement_of_each_lost_rank_takes_its_place() -> None:
    roster = {0: 10, 1: 11, 2: 12, 3: 13}
    joiners = [Joiner(21, 3), Joiner(22, 1)]
    record = decide(1, roster, 4, frozenset({11, 13}), joiners)
    assert record.slots() == (10, 22, 12, 21)


# -- the places: after rank assignment and filter -------------------------------------------


LONG = timedelta(minutes=1)
policies = st.sampled_from(
    [
        ShiftRanks(),
        FillGaps(),
        Compose(ShiftRanks(), AwaitReplacements(LONG)),
        Compose(AwaitReplacements(LONG), FillGaps()),
        Compose(ShiftRanks(), Marks(lambda rank, size: rank // 2, lambda n: n == 2)),
        Compose(FillGaps(), Marks(lambda rank, size: rank % 3, lambda n: n > 1)),
    ]
)
filters = st.sampled_from(
    [
        None,
        MaxActiveWorldSize(3),
        WorldSizeDivisibleBy(),
        Compose(WorldSizeDivisibleBy(1), MaxActiveWorldSize(2)),
    ]
)


@given(view_changes(), policies, filters)
def test_ranks_are_dense_and_sizes_equal(
    change: ViewChange, policy: RankAssignment, rank_filter: RankFilter | None
) -> None:
    places = states_in_view(change.record, policy, rank_filter)
    assert {*places} <= change.record.expected
    assert sorted(state.rank for state in places.values()) == [*range(len(places))]
    assert {state.world_size for state in places.values()} <= {len(places)}
    assert len({state.active_world_size for state in places.values()}) <= 1
    for state in places.values():
        assert state.iteration == change.record.iteration
        active = state.rank < state.active_world_size
        assert state.status is (Status.INITIALIZED if active else Status.INACTIVE)


@given(view_changes(), st.sampled_from([ShiftRanks(), FillGaps()]))
def test_nobody_is_discarded_without_a_reason_and_a_full_view_moves_nobody(
    change: ViewChange, policy: RankAssignment
) -> None:
    places = states_in_view(change.record, policy)
    slots = change.record.slots()
    assert {*places} == change.record.expected
    if None not in slots:
        assert {state.rank: member for member, state in places.items()} == dict(enumerate(slots))


@given(view_changes(), policies, filters)
def test_each_member_finds_for_itself_what_all_find(
    change: ViewChange, policy: RankAssignment, rank_filter: RankFilter | None
) -> None:
    places = states_in_view(change.record, policy, rank_filter)
    for member in change.record.expected:
        # Where it has been, and as what, does not matter.
        mine = State(6, 7, 5, 9, 1, iteration=3, status=Status.INACTIVE, store=object())
        if member not in places:
            with pytest.raises(RankDiscarded):
                state_in_view(change.record, member, mine, policy, rank_filter)
            continue
        found = state_in_view(change.record, member, mine, policy, rank_filter)
        assert (found.initial_rank, found.initial_world_size) == (5, 9)
        expected = places[member]
        for name in ("rank", "world_size", "active_world_size", "iteration", "status"):
            assert getattr(found, name) == getattr(expected, name)
        assert (mine.rank, mine.iteration, mine.status) == (6, 3, Status.INACTIVE)


@given(view_changes(), st.sampled_from([Leaves(), AwaitReplacements(LONG)]))
def test_empty_places_must_be_dealt_with(change: ViewChange, policy: RankAssignment) -> None:
    slots = change.record.slots()
    empty = [rank for rank, member in enumerate(slots) if member is None]
    if empty and change.record.expected:
        with pytest.raises(RestartError, match=re.escape(f"terminated ranks {empty} unhandled")):
            states_in_view(change.record, policy)
    else:
        assert {*states_in_view(change.record, policy)} == change.record.expected


RECORD = ViewRecord(4, (10, 11, 12, 13), frozenset({11}))


def test_marked_ranks_that_nobody_drops_are_named() -> None:
    marks = FilterGroupedByKey(lambda rank, size: rank // 2, lambda n: n == 2)
    with pytest.raises(RestartError, match=r"FilterGroupedByKey.*ranks \[0, 1\] unhandled"):
        state_in_view(RECORD, 12, state_of(2, 4), marks)


def test_who_is_not_in_the_view_has_no_place() -> None:
    with pytest.raises(ValueError, match="member 11 is not in the view of iteration 4"):
        state_in_view(RECORD, 11, state_of(1, 4), ShiftRanks())


def test_the_store_stays_with_the_state() -> None:
    store = object()
    assert state_in_view(RECORD, 12, state_of(2, 4, store=store), ShiftRanks()).store is store


@pytest.mark.parametrize("kind", [list, set, tuple, dict.fromkeys])
def test_ranks_that_are_dropped_may_be_left_in_any_collection(kind: Any) -> None:
    class Keeps(RankAssignment):
        def __call__(self, state: State, terminated_ranks: Any) -> Any:
            after, _ = ShiftRanks()(state, terminated_ranks)
            return [after, kind(terminated_ranks)]

    assert state_in_view(RECORD, 12, state_of(2, 4), Keeps()).rank == 1


def test_a_policy_may_change_the_set_and_return_none_for_it() -> None:
    class Drops(RankAssignment):
        def __call__(self, state: State, terminated_ranks: Any) -> Any:
            terminated_ranks.add(0)
            after, left = ShiftRanks()(state, terminated_ranks)
            left.update(())  # type: ignore[attr-defined]
            return after, None

    found = state_in_view(RECORD, 12, state_of(2, 4), Drops())
    assert (found.rank, found.world_size) == (0, 2)


def test_ranks_that_are_marked_after_the_others_were_dropped_are_unhandled() -> None:
    policy = Compose(Marks(lambda rank, size: rank // 2, lambda n: n == 2), ShiftRanks())
    with pytest.raises(RestartError, match=r"ranks \[2\] unhandled"):
        state_in_view(RECORD, 12, state_of(2, 4), policy)


@pytest.mark.parametrize(
    "returned", [None, State(0, 1), (State(0, 1),), (None, set()), ("state", set()), 3]
)
def test_a_policy_that_returns_no_state_is_named(returned: Any) -> None:
    class Wrong(RankAssignment, RankFilter):
        def __call__(self, *_: Any) -> Any:
            return returned

    with pytest.raises(TypeError, match=r"Wrong object.* must return .*not"):
        state_in_view(RECORD, 12, state_of(2, 4), Wrong())
    if not isinstance(returned, State):
        with pytest.raises(TypeError, match=r"Wrong object.* must return the state, not"):
            state_in_view(RECORD, 12, state_of(2, 4), ShiftRanks(), Wrong())


@pytest.mark.parametrize(("rank", "size"), [(3, 3), (-1, 3)])
def test_a_place_that_does_not_exist_is_no_place(rank: int, size: int) -> None:
    class Wrong(RankAssignment):
        def __call__(self, state: State, terminated_ranks: Any) -> Any:
            return state.copy(rank=rank, world_size=size), frozenset()

    with pytest.raises(RestartError, match=f"Wrong.*gave rank {rank} of a world size of {size}"):
        state_in_view(RECORD, 12, state_of(2, 4), Wrong())


@pytest.mark.parametrize("rank_filter", [None, MaxActiveWorldSize()])
def test_an_assignment_need_not_know_of_filters(rank_filter: RankFilter | None) -> None:
    class Plain(RankAssignment):
        def __call__(self, state: State, terminated_ranks: Any) -> Any:
            state.rank, state.world_size = 0, 1
            return state, frozenset()

    assert state_in_view(RECORD, 12, state_of(2, 4), Plain(), rank_filter).active_world_size == 1


@pytest.mark.parametrize("active", [-1, 4])
def test_more_active_ranks_than_there_are_is_wrong(active: int) -> None:
    class Wrong(RankFilter):
        def __call__(self, state: State) -> State:
            return state.copy(active_world_size=active)

    with pytest.raises(RestartError, match=f"Wrong.*active world size of {active} out of 3"):
        state_in_view(RECORD, 12, state_of(2, 4), ShiftRanks(), Wrong())


def test_what_a_filter_raises_goes_up() -> None:
    with pytest.raises(RestartAbort, match="divisor=4"):
        states_in_view(RECORD, ShiftRanks(), WorldSizeDivisibleBy(4))
