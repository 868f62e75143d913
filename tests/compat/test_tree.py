"""`Tree`: activation, reserve, backfill, groups that leave, and newcomers; equal on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inprocess.view_strategies import state_of
from outlast.compat.nvrx.tree import Layer, LayerFlag, Tree
from outlast.errors import RankDiscarded, RestartAbort
from outlast.inprocess.state import State, Status

RESERVE, BACKFILL = LayerFlag.RESERVE, LayerFlag.BACKFILL


def by_host(width: int) -> Any:
    return lambda state: f"host{state.initial_rank // width}"


class Ranks:
    """A job without processes: one `Tree` on each rank, and the exchange of what they publish."""

    def __init__(self, size: int, make: Any) -> None:
        self.make = make
        self.trees: dict[int, Tree] = {n: make() for n in range(size)}
        self.states = {n: state_of(n, size) for n in range(size)}
        self.iteration = -1
        self.discarded: dict[int, str] = {}

    def step(self, dead: set[int] = frozenset(), joined: dict[int, int] | None = None) -> Ranks:  # type: ignore[assignment]
        """The next iteration, without the processes `dead`, and with new ones: `joined` has the
        rank that each of them takes.
        """
        self.iteration += 1
        for process in dead:
            del self.states[process]
        old = sorted(self.states)
        size = max(s.world_size for s in self.states.values())
        for process, rank in (joined or {}).items():
            self.trees[process] = self.make()
            size = max(size, rank + 1)
            self.states[process] = State(rank, size)
        told = sorted(old, key=lambda p: self.states[p].rank)[:2] if joined else []
        before = {
            p: s.copy(world_size=size, iteration=self.iteration, status=Status.INITIALIZED)
            for p, s in self.states.items()
        }
        values = {
            state.rank: self.trees[p].publish(state, for_newcomers=p in told)
            for p, state in before.items()
        }
        gone = frozenset(range(size)) - values.keys()
        for process, state in before.items():
            self.trees[process].receive({r: v for r, v in values.items() if v is not None})
            try:
                self.states[process], left = self.trees[process](state, gone)
                assert not left
            except (RankDiscarded, RestartAbort) as e:
                self.discarded[process] = str(e)
        for process in self.discarded:
            self.states.pop(process, None)
        sizes = {(s.world_size, s.active_world_size) for s in self.states.values()}
        assert len(sizes) <= 1
        assert sorted(s.rank for s in self.states.values()) == [*range(len(self.states))]
        for state in self.states.values():
            active = state.rank < state.active_world_size
            assert state.status is (Status.INITIALIZED if active else Status.INACTIVE)
        return self

    @property
    def active(self) -> dict[int, int]:
        """The rank of each process that calls the function."""
        found = {p: s.rank for p, s in self.states.items() if s.active}
        return dict(sorted(found.items()))


def test_ranks_are_activated_up_to_the_limit_of_each_layer() -> None:
    layers = [Layer(max_ranks=5), Layer(max_ranks=3, key_or_fn=by_host(4))]
    assert Ranks(8, lambda: Tree(layers)).step().active == {0: 0, 1: 1, 2: 2, 4: 3, 5: 4}


def test_ranks_in_another_order_than_the_tree_are_renumbered_with_a_warning() -> None:
    layers = [Layer(), Layer(key_or_fn=lambda state: state.initial_rank % 2)]
    with pytest.warns(UserWarning, match="not in the order of the tree"):
        assert Ranks(4, lambda: Tree(layers)).step().active == {0: 0, 1: 2, 2: 1, 3: 3}


def test_a_reserve_rank_of_the_same_host_comes_first_then_one_of_another() -> None:
    layers = [Layer(flag=RESERVE), Layer(max_ranks=3, key_or_fn=by_host(4), flag=RESERVE)]
    job = Ranks(8, lambda: Tree(layers)).step()
    assert job.step({1}).active == {0: 0, 2: 2, 3: 1, 4: 3, 5: 4, 6: 5}
    assert job.step({0}).active == {2: 2, 3: 1, 4: 3, 5: 4, 6: 5, 7: 0}
    assert job.step({5}).active == {2: 2, 3: 1, 4: 3, 6: 4, 7: 0}  # none is left: shifted


@pytest.mark.parametrize(
    ("outer", "inner", "after"),
    [
        (RESERVE, None, {0: 0, 3: 1, 4: 2}),  # the search begins at the host
        (None, RESERVE, {0: 0, 3: 1, 4: 2}),  # and does not leave it
        (None, None, {0: 0, 3: 1, 4: 2}),
        (RESERVE, RESERVE, {0: 0, 3: 2, 4: 3, 5: 1}),
    ],
)
def test_the_search_for_a_reserve_rank_goes_up_as_far_as_the_layers_are_marked(
    outer: LayerFlag | None, inner: LayerFlag | None, after: dict[int, int]
) -> None:
    layers = [Layer(flag=outer), Layer(max_ranks=2, key_or_fn=by_host(3), flag=inner)]
    job = Ranks(6, lambda: Tree(layers)).step()
    assert job.active == {0: 0, 1: 1, 3: 2, 4: 3}
    assert job.step({1, 2}).active == after


@pytest.mark.parametrize(
    ("outer", "inner", "after"),
    [
        (BACKFILL, BACKFILL, {0: 0, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 1}),
        (None, BACKFILL, {0: 0, 2: 2, 3: 1, 4: 3, 5: 4, 6: 5, 7: 6}),
        (BACKFILL, None, {0: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6}),
        (None, None, {0: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6}),
    ],
)
def test_gaps_are_filled_from_the_end_of_the_outermost_marked_group(
    outer: LayerFlag | None, inner: LayerFlag | None, after: dict[int, int]
) -> None:
    layers = [Layer(flag=outer), Layer(key_or_fn=by_host(4), flag=inner)]
    assert Ranks(8, lambda: Tree(layers)).step().step({1}).active == after


def test_a_host_below_its_minimum_leaves_and_is_replaced_as_a_whole() -> None:
    layers = [Layer(2, 4, "job", RESERVE), Layer(2, 2, by_host(2), RESERVE)]
    job = Ranks(6, lambda: Tree(layers)).step()
    assert job.active == {0: 0, 1: 1, 2: 2, 3: 3}
    job.step({2})
    assert sorted(job.active) == [0, 1, 4, 5]
    assert (job.active[0], job.active[1]) == (0, 1)
    assert "group 'host1' in layer 1 of the tree has 1 healthy ranks" in job.discarded[3]
    assert job.step({0}).active.keys() == {4, 5}


def test_below_the_minimum_of_the_root_all_leave() -> None:
    layers = [Layer(min_ranks=7), Layer(key_or_fn=by_host(4))]
    job = Ranks(8, lambda: Tree(layers)).step()
    job.step({0, 5})
    assert len(job.discarded) == 6
    assert "fewer than min_ranks=7" in job.discarded[1]


def test_inner_groups_that_leave_count_for_the_outer_ones() -> None:
    layers = [Layer(min_ranks=5), Layer(min_ranks=3, key_or_fn=by_host(3))]
    job = Ranks(6, lambda: Tree(layers)).step()
    job.step({0})
    assert not job.states


def test_the_filter_of_the_size_puts_the_highest_ranks_into_the_reserve() -> None:
    layers = [Layer(flag=RESERVE)]
    job = Ranks(7, lambda: Tree(layers, lambda n: n // 2 * 2)).step()
    assert sorted(job.active.values()) == [*range(6)]
    assert job.step({2}).active == {0: 0, 1: 1, 3: 3, 4: 4, 5: 5, 6: 2}
    assert job.step({0}).active == {1: 0, 3: 2, 4: 3, 6: 1}
    with pytest.raises(ValueError, match=r"world_size_filter\(2\) returned 3"):
        Tree([Layer()], lambda n: n + 1)(state_of(0, 2), frozenset())


def test_a_newcomer_with_the_same_groups_takes_the_place_of_the_lost_rank() -> None:
    layers = [Layer(flag=RESERVE), Layer(key_or_fn="host0", flag=RESERVE)]
    job = Ranks(4, lambda: Tree(layers)).step()
    rank = job.states[2].rank
    assert job.step({2}, {20: rank}).active == {0: 0, 1: 1, 3: 3, 20: 2}


def test_a_job_that_has_shrunk_grows_again_by_a_newcomer() -> None:
    layers = [Layer(max_ranks=4, flag=RESERVE), Layer(max_ranks=2, key_or_fn=by_host(2))]
    job = Ranks(4, lambda: Tree(layers)).step().step({1})
    assert job.active == {0: 0, 2: 1, 3: 2}
    job.step(joined={20: 3})  # on host1, which is full: it stays in reserve
    assert job.active == {0: 0, 2: 1, 3: 2}
    job = Ranks(4, lambda: Tree([Layer(max_ranks=4)])).step().step({1})
    assert job.step(joined={20: 3}).active == {0: 0, 2: 1, 3: 2, 20: 3}


def test_without_any_active_rank_the_job_ends() -> None:
    job = Ranks(2, lambda: Tree([Layer(max_ranks=1)])).step()
    assert "no rank can be active" in job.step({0}).discarded[1]


def test_without_a_job_a_tree_is_tested_in_one_line() -> None:
    tree = Tree([Layer(max_ranks=2, flag=RESERVE)])
    state = State()
    state.rank, state.world_size = 2, 3
    state, _ = tree(state, {})
    assert (state.rank, state.active_world_size, state.active) == (2, 2, False)
    state, _ = tree(state, {0})
    assert (state.rank, state.world_size, state.active) == (0, 2, True)
    with pytest.raises(RankDiscarded, match="one of the terminated ranks"):
        tree(state, [0])


def test_misuse_names_the_argument() -> None:
    with pytest.raises(TypeError, match="layers"):
        Tree([])
    with pytest.raises(TypeError, match="layers"):
        Tree([{"min_ranks": 1}])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="world_size_filter"):
        Tree([Layer()], 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_ranks"):
        Layer(min_ranks=-1)
    with pytest.raises(TypeError, match="flag"):
        Layer(flag="RESERVE")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="one key in the first layer"):
        Tree([Layer(key_or_fn=lambda s: s.rank)])(state_of(0, 2), ())


flags = st.sampled_from([None, RESERVE, BACKFILL, RESERVE | BACKFILL])


@given(st.data())
def test_every_rank_arrives_at_the_same_arrangement(data: st.DataObject) -> None:
    size, width = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 4))
    limits = st.one_of(st.none(), st.integers(1, 6))
    layers = [
        Layer(data.draw(st.integers(0, 3)), data.draw(limits), "job", data.draw(flags)),
        Layer(data.draw(st.integers(0, 3)), data.draw(limits), by_host(width), data.draw(flags)),
    ]
    job = Ranks(size, lambda: Tree(layers)).step()  # each step checks it
    for number in range(4):
        alive = sorted(job.states)
        if len(alive) < 2:
            return
        dead = data.draw(st.sets(st.sampled_from(alive), max_size=len(alive) - 1))
        world = job.states[alive[0]].world_size
        free = {job.states[p].rank for p in dead} | {world}
        took = data.draw(st.sets(st.sampled_from(sorted(free))))
        joined = {100 * number + 50 + rank: rank for rank in sorted(took)}
        before = {p: r for p, r in job.active.items() if p not in dead}
        job.step(dead, joined)
        if not dead and not joined:
            assert job.active == before
