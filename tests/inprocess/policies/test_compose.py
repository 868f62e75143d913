"""Compose runs right to left, and is an instance of the common base of its parts."""

from __future__ import annotations

import abc
import collections
import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inprocess.view_strategies import state_of
from outlast.inprocess.compose import Compose, iter_parts
from outlast.inprocess.finalize import Finalize
from outlast.inprocess.health_check import FaultCounter, HealthCheck
from outlast.inprocess.initialize import Initialize, RetryController
from outlast.inprocess.rank_assignment import FillGaps, RankAssignment, ShiftRanks
from outlast.inprocess.rank_filter import MaxActiveWorldSize, RankFilter, WorldSizeDivisibleBy
from outlast.inprocess.state import State


class Note:
    """A part that records its calls and their arguments."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def __call__(self, value: str) -> str:
        self.calls.append(self.name)
        return f"{self.name}({value})"


def test_it_calls_from_right_to_left() -> None:
    calls: list[str] = []
    composed = Compose(*(Note(name, calls) for name in "abc"))
    assert composed("x") == "a(b(c(x)))"
    assert calls == ["c", "b", "a"]


# A tree of parts: a leaf is a letter, a branch is composed.
trees = st.recursive(
    st.sampled_from("abcdef"), lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=12
)


@given(trees)
def test_it_does_not_matter_how_parts_are_nested(tree: Any) -> None:
    calls: list[str] = []

    def build(node: Any) -> Any:
        return Note(node, calls) if isinstance(node, str) else Compose(*map(build, node))

    def letters(node: Any) -> list[str]:
        return [node] if isinstance(node, str) else [x for inner in node for x in letters(inner)]

    composed = build(tree)
    assert composed("x") == "(".join([*letters(tree), "x"]) + ")" * len(letters(tree))
    assert calls == letters(tree)[::-1] == [part.name for part in iter_parts(composed)]
    assert isinstance(composed, Note)


def test_a_tuple_is_the_arguments_of_the_next_part() -> None:
    composed = Compose(lambda a, b: (b, a), lambda a, b=2: (a, b))
    assert composed(1) == (2, 1)
    assert composed(1, b=5) == (5, 1)


def test_only_a_plain_tuple_is_taken_apart() -> None:
    point = collections.namedtuple("point", "x y")
    assert Compose(lambda p: p.x, lambda: point(1, 2))() == 1
    assert Compose(len, lambda: [1, 2, 3])() == 3
    assert Compose(lambda: "none", lambda: ())() == "none"


class Counting:
    """A part without parameters or results."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


def test_parts_without_arguments_are_each_called_without_any() -> None:
    part = Counting()
    assert Compose(part, part, part)() is None
    assert part.calls == 3
    # A part that may be called without arguments is; one that needs one gets the None.
    assert Compose(lambda x=1: x, part)() == 1
    assert Compose(lambda x: [x], part)() == [None]


def test_a_part_without_parameters_follows_one_that_returned_none() -> None:
    part, seen = Counting(), []
    assert Compose(part, part, seen.append)("x") is None
    assert (part.calls, seen) == (2, ["x"])


def test_a_part_that_forgets_its_return_causes_a_warning_and_the_chain_goes_on() -> None:
    seen: list[Any] = []

    def forgets(value: Any) -> None:
        seen.append(value)

    with pytest.warns(UserWarning, match=r"forgets.* was called with arguments and returned None"):
        assert Compose(lambda x: [x], forgets)(1) == [None]
    with pytest.warns(UserWarning, match="the chain was not continued"):
        assert Compose(forgets, forgets)(2) is None
    with pytest.warns(UserWarning, match="forgets"):
        assert Compose(forgets, lambda x: x + 1)(2) is None
    assert seen == [1, 2, None, 3]


def test_a_none_that_is_passed_on_is_no_warning() -> None:
    assert Compose(lambda x: x, lambda x: x, lambda x: x)(None) is None
    assert Compose(lambda x: x is None, lambda: None)() is True


def test_parts_are_as_given_and_leaves_in_call_order() -> None:
    a, b, c = ShiftRanks(), FillGaps(), ShiftRanks()
    composed = Compose(a, Compose(b, c))
    assert composed.parts[0] is a
    assert [*iter_parts(composed)] == [c, b, a]
    assert [*iter_parts(a)] == [a]


@pytest.mark.parametrize(
    ("parts", "base", "not_a"),
    [
        ([ShiftRanks(), FillGaps()], RankAssignment, ShiftRanks),
        ([ShiftRanks(), ShiftRanks()], ShiftRanks, FillGaps),
        ([ShiftRanks(), Compose(FillGaps(), ShiftRanks())], RankAssignment, ShiftRanks),
        ([Compose(ShiftRanks(), FillGaps()), FillGaps()], RankAssignment, FillGaps),
        ([Compose(ShiftRanks()), Compose(FillGaps())], RankAssignment, ShiftRanks),
        ([MaxActiveWorldSize(2), WorldSizeDivisibleBy(2)], RankFilter, RankAssignment),
        ([FaultCounter(2)], FaultCounter, Finalize),
        ([RetryController(2), FaultCounter()], abc.ABC, Initialize),
        ([RetryController(2), print], object, Initialize),
        ([print, len], object, Initialize),
        ([functools.partial(int), functools.partial(str)], object, functools.partial),
        ([str, int], object, type),
        ([torch.nn.Identity(), torch.nn.ReLU()], torch.nn.Module, torch.nn.ReLU),
    ],
)
def test_it_is_the_closest_common_base(parts: list[Any], base: type, not_a: type) -> None:
    composed = Compose(*parts)
    assert isinstance(composed, base)
    assert isinstance(composed, Compose)
    assert not isinstance(composed, not_a)
    assert callable(composed)


def test_a_class_between_the_parts_and_the_abstract_one_is_closer() -> None:
    class Mine(HealthCheck, abc.ABC):
        pass

    class One(Mine):
        def __call__(self, state: State, train_ex: BaseException | None = None) -> Any:
            return state, train_ex

    class Two(One):
        pass

    assert isinstance(Compose(Two(), One()), One)
    assert not isinstance(Compose(Two(), One()), Two)
    assert isinstance(Compose(Two(), FaultCounter()), HealthCheck)
    assert not isinstance(Compose(Two(), FaultCounter()), Mine)


def test_a_base_that_wants_more_than_a_call_is_passed_over() -> None:
    class More(RankFilter):
        @abc.abstractmethod
        def more(self) -> None: ...

    class Part(More):
        def __call__(self, state: State) -> State:
            return state

        def more(self) -> None: ...

    assert isinstance(Compose(Part(), Part()), Part)

    class Other(More):
        def __call__(self, state: State) -> State:
            return state

        def more(self) -> None: ...

    composed = Compose(Part(), Other())
    assert isinstance(composed, RankFilter)
    assert not isinstance(composed, More)


def test_the_base_is_not_set_up_again_and_may_guard_its_attributes() -> None:
    class Guarded(RankFilter):
        def __init__(self, limit: int) -> None:
            object.__setattr__(self, "limit", limit)

        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError(name)

        def __call__(self, state: State) -> State:
            return state.copy(active_world_size=vars(self)["limit"])

    composed = Compose(Guarded(2), Guarded(3))
    assert isinstance(composed, Guarded)
    assert composed(state_of(0, 8)).active_world_size == 2
    assert "limit" not in vars(composed)


def test_a_subclass_composes_too() -> None:
    class Mine(Compose):
        pass

    assert isinstance(Mine(ShiftRanks(), FillGaps()), Mine)
    assert isinstance(Mine(ShiftRanks(), FillGaps()), RankAssignment)


def test_its_text_names_the_parts() -> None:
    composed = Compose(MaxActiveWorldSize(3), WorldSizeDivisibleBy(2))
    assert repr(composed) == (
        "Compose(MaxActiveWorldSize(max_active_world_size=3), WorldSizeDivisibleBy(divisor=2))"
    )


def test_without_parts_it_is_an_error() -> None:
    with pytest.raises(TypeError, match="at least one part"):
        Compose()


def test_what_cannot_be_called_is_named() -> None:
    with pytest.raises(TypeError, match=r"part 1 must be callable, not 3"):
        Compose(ShiftRanks(), 3)


def test_a_class_in_place_of_an_instance_is_named() -> None:
    with pytest.raises(TypeError, match=r"part 0 is the class ShiftRanks; .*ShiftRanks\(\.\.\.\)"):
        Compose(ShiftRanks, FillGaps())


def test_assignments_pass_their_two_values_on() -> None:
    state, unhandled = Compose(ShiftRanks(), FillGaps())(state_of(3, 4), frozenset({1}))
    assert (state.rank, state.world_size, unhandled) == (1, 3, frozenset())
