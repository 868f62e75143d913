"""`State`: its defaults, its copies, and the store that connects on first use."""

from __future__ import annotations

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
    assert (copy.rank, copy.world_size, copy.active_world_size) == (2, 3, 1)
    copy.rank = 5
    assert state.rank == 0


def test_a_store_that_is_there_is_given_as_it_is() -> None:
    store = object()
    state = State(0, 1, 0, 1, store=store)
    assert state.store is store
    state.store = None
    assert state.store is None
