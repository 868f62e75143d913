"""`State`: its defaults, its copies, and the store that connects on first use."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.inprocess.rank_assignment import FillGaps, ShiftRanks
from outlast.inprocess.rank_filter import MaxActiveWorldSize
from outlast.inprocess.state import LazyStore, State, Status


class Connect:
    """Creates stores and counts them."""

    def __init__(self) -> None:
        self.made: list[object] = []

    def __call__(self) -> object:
        self.made.append(object())
        return self.made[-1]


def test_all_are_active_at_first() -> None:
    state = State(1, 4, initial_rank=1, initial_world_size=4)
    assert (state.active_world_size, state.iteration, state.status) == (4, 0, Status.INITIALIZED)
    assert state.active
    assert state.store is None
    assert not state.copy(status=Status.INACTIVE).active


def test_without_arguments_it_is_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    state = State()
    assert (state.rank, state.world_size, state.iteration) == (3, 8, 0)
    assert (state.initial_rank, state.initial_world_size, state.active_world_size) == (3, 8, 8)
    assert state.status is Status.INITIALIZED
    monkeypatch.setenv("RANK", "8")
    with pytest.raises(ValueError, match="RANK=8 must be at least 0 and below WORLD_SIZE=8"):
        State()
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert (State().rank, State().world_size) == (0, 1)
    assert (State(2, 5).initial_rank, State(2, 5).initial_world_size) == (2, 5)


@pytest.mark.parametrize("gone", [{1, 4}, [1, 4, 1], (4, 1), {1: "a", 4: "b"}, frozenset({1, 4})])
def test_a_policy_is_tested_in_one_line(gone: Any) -> None:
    state = State()
    state.rank, state.world_size = 3, 5
    after, unhandled = ShiftRanks()(state, gone)
    assert (after.rank, after.world_size, after.active_world_size, unhandled) == (2, 3, 3, set())
    after, _ = FillGaps()(state, gone)
    assert (after.rank, after.world_size) == (1, 3)
    after, _ = ShiftRanks()(state, {})
    assert (after.rank, after.world_size) == (3, 5)
    assert (state.rank, state.world_size) == (3, 5)
    assert MaxActiveWorldSize(4)(state).active_world_size == 4


def test_a_lazy_store_is_connected_once_and_when_asked_for() -> None:
    connect = Connect()
    state = State(0, 1, 0, 1, store=LazyStore(connect))
    repr(state)
    assert state == state.copy(iteration=0)
    assert not connect.made
    assert [state.store, state.store] == connect.made * 2
    assert len(connect.made) == 1


def test_a_copy_shares_the_store_without_connecting() -> None:
    connect = Connect()
    state = State(0, 1, 0, 1, store=LazyStore(connect))
    copy = state.copy(rank=2, world_size=3)
    assert not connect.made
    assert copy.store is state.store
    assert len(connect.made) == 1
    assert (copy.rank, copy.world_size, copy.active_world_size) == (2, 3, 3)
    copy.rank = 5
    assert state.rank == 0


def test_a_store_that_is_there_is_given_as_it_is() -> None:
    store = object()
    state = State(0, 1, 0, 1, store=store)
    assert state.store is store
    state.store = None
    assert state.store is None
