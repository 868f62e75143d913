"""FilterGroupedByKey with keys that ranks (threads) exchange through torch's stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from inprocess.view_strategies import state_of
from outlast.errors import RankDiscarded, RankTimeout, StoreError
from outlast.inprocess.compose import Compose
from outlast.inprocess.rank_assignment import FilterGroupedByKey, RankAssignment, ShiftRanks

Connect = Callable[[], Any]
NODES = ["a", "a", "b", "b", "c", "c"]


@pytest.fixture(params=["hash", "file", "tcp"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """Connects each rank to one store."""
    if request.param == "hash":
        store = dist.HashStore()
        yield lambda: store
    elif request.param == "file":
        yield lambda: dist.FileStore(str(tmp_path / "store"), -1)
    else:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = server.port  # pytest keeps the function for longer than the server may live
        yield lambda: dist.TCPStore("127.0.0.1", port, is_master=False)
        del server


def run(
    policies: dict[int, RankAssignment],
    store: Connect,
    size: int,
    terminated: set[int],
    iteration: int = 0,
) -> dict[int, Any]:
    """Calls the policies of all ranks at once; returns (new rank, new size), or the exception."""

    def one(rank: int) -> Any:
        state = state_of(rank, size, iteration=iteration, store=store())
        try:
            after, unhandled = policies[rank](state, frozenset(terminated))
        except Exception as e:  # noqa: BLE001 - the test decides which are right
            return e
        return (after.rank, after.world_size, unhandled)

    with ThreadPoolExecutor(len(policies)) as pool:
        return dict(zip(policies, pool.map(one, policies), strict=True))


def whole_nodes(rank: int, timeout: float = 60.0) -> RankAssignment:
    limit = timedelta(seconds=timeout)
    return Compose(ShiftRanks(), FilterGroupedByKey(NODES[rank], lambda n: n == 2, limit))


def test_the_rest_of_a_node_that_lost_a_rank_is_discarded(connect: Connect) -> None:
    ranks = {rank: whole_nodes(rank) for rank in (0, 1, 2, 4, 5)}
    found = run(ranks, connect, 6, {3})
    none = frozenset[int]()
    discarded = found.pop(2)
    assert found == {0: (0, 4, none), 1: (1, 4, none), 4: (2, 4, none), 5: (3, 4, none)}
    assert isinstance(discarded, RankDiscarded)
    assert "its group 'b' has 1 healthy ranks" in str(discarded)


@pytest.mark.parametrize(
    "keys", [[7, 7, 8], [("a", 1), ("a", 1), ("a", 2)], [None, None, 0.5], [b"x", b"x", "ü"]]
)
def test_a_value_of_any_type_is_a_key(connect: Connect, keys: list[Any]) -> None:
    ranks: dict[int, RankAssignment] = {
        rank: FilterGroupedByKey(key, lambda n: n == 2, 20) for rank, key in enumerate(keys)
    }
    assert run(ranks, connect, 3, set()) == {rank: (rank, 3, {2}) for rank in range(3)}


def test_a_function_is_called_for_its_own_rank() -> None:
    """It may return what only this process knows, such as the name of the host."""
    asked: list[tuple[int, int]] = []

    def on_host(host: str) -> Callable[[int, int], str]:
        return lambda rank, size: asked.append((rank, size)) or host  # type: ignore[func-returns-value]

    ranks: dict[int, RankAssignment] = {
        rank: FilterGroupedByKey(on_host(NODES[rank]), lambda n: n == 2, 20) for rank in (0, 1, 2)
    }
    store = dist.HashStore()
    found = run(ranks, lambda: store, 4, {3})
    assert found == {rank: (rank, 4, {2, 3}) for rank in (0, 1, 2)}
    assert sorted(asked) == [(0, 4), (1, 4), (2, 4)]


def test_several_keys_in_one_iteration_do_not_mix(connect: Connect) -> None:
    def both(rank: int) -> RankAssignment:
        rack = FilterGroupedByKey("left" if rank < 4 else "right", lambda n: n >= 2)
        node = FilterGroupedByKey(NODES[rank], lambda n: n == 2)
        return Compose(ShiftRanks(), rack, node)

    # Rank 1 is lost: rank 0 falls with node a, and the left rack still has two.
    found = run({rank: both(rank) for rank in (0, 2, 3, 4, 5)}, connect, 6, {1})
    assert isinstance(found.pop(0), RankDiscarded)
    assert [found[rank][:2] for rank in (2, 3, 4, 5)] == [(0, 4), (1, 4), (2, 4), (3, 4)]


class Watched:
    """A store that counts the deleted keys."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.removed: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def delete_key(self, key: str) -> bool:
        self.removed.append(key)
        return bool(self.store.delete_key(key))


def test_it_goes_on_from_iteration_to_iteration_and_removes_what_is_old_once() -> None:
    store = Watched()
    policies = {rank: whole_nodes(rank) for rank in range(6)}
    for iteration in range(5):
        found = run(policies, lambda: store, 6, set(), iteration)
        assert [found[rank][:2] for rank in range(6)] == [(rank, 6) for rank in range(6)]
        assert store.num_keys() == 12
        assert len(store.removed) == len(set(store.removed)) == 12 * iteration


def test_a_newcomer_meets_those_that_were_there_before(connect: Connect) -> None:
    policies = {rank: whole_nodes(rank) for rank in range(2)}
    for iteration in range(3):
        run(policies, connect, 2, set(), iteration)
    policies |= {rank: whole_nodes(rank, 10) for rank in (2, 3)}
    found = run(policies, connect, 4, set(), 3)
    assert [found[rank][:2] for rank in range(4)] == [(rank, 4) for rank in range(4)]


def test_a_second_call_of_a_wrapper_does_not_lose_keys_to_the_first() -> None:
    # Places are swapped from the first call to the second, both at iteration 0.
    policies = {rank: whole_nodes(rank) for rank in range(4)}
    run(policies, dist.HashStore, 4, {1, 2, 3})  # separate stores: only rank 0 is alone
    again = {rank: policies[3 - rank] for rank in range(4)}
    store = dist.HashStore()
    found = run(again, lambda: store, 4, set())
    assert [found[rank][:2] for rank in range(4)] == [(rank, 4) for rank in range(4)]


def test_who_does_not_publish_is_named(connect: Connect) -> None:
    start = time.monotonic()
    found = run({rank: whole_nodes(rank, 0.5) for rank in (0, 2, 5)}, connect, 6, {3}, 7)
    assert time.monotonic() - start < 30
    for rank, error in found.items():
        assert isinstance(error, RankTimeout), error
        assert str(error) == (
            f"rank {rank}: FilterGroupedByKey: in iteration 7, ranks [1, 4] did not publish "
            "their keys within timeout=0.5 s"
        )


def test_a_rank_that_is_late_is_waited_for(connect: Connect) -> None:
    class Late(RankAssignment):
        def __call__(self, state: Any, terminated_ranks: Any) -> Any:
            time.sleep(0.3)
            return state, terminated_ranks

    policies = {0: whole_nodes(0), 1: Compose(whole_nodes(1), Late())}
    found = run(policies, connect, 2, set())
    assert [found[rank][:2] for rank in range(2)] == [(0, 2), (1, 2)]


def test_a_rank_that_is_marked_already_neither_publishes_nor_waits() -> None:
    store = dist.HashStore()
    state = state_of(1, 2, store=store)
    marks = FilterGroupedByKey("key", bool)
    assert marks(state, frozenset({1})) == (state, frozenset({1}))
    assert store.num_keys() == 0


def test_a_store_that_is_gone_is_a_store_error() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    with pytest.raises(StoreError, match="rank 0: the group keys of iteration 0 cannot be"):
        FilterGroupedByKey("key", bool)(state_of(0, 2, store=client), frozenset())
