"""Delta debugging: the shortest part of a list that fails."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outlast.campaign.generate import shorten


@given(st.integers(1, 40), st.data())
def test_the_culprits_are_found(size: int, data: st.DataObject) -> None:
    culprits = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    found = shorten(range(size), lambda part: culprits <= set(part), most_runs=10_000)
    assert found == sorted(culprits)


@given(st.integers(1, 40), st.data())
def test_no_part_of_the_result_without_one_item_fails(size: int, data: st.DataObject) -> None:
    either = data.draw(st.lists(st.sets(st.integers(0, size - 1), min_size=1), min_size=1))

    def fails(part: list[int]) -> bool:
        return any(some <= set(part) for some in either)

    if not fails(list(range(size))):
        return
    found = shorten(range(size), fails, most_runs=10_000)
    assert fails(found)
    assert not any(fails(found[:i] + found[i + 1 :]) for i in range(len(found)) if len(found) > 1)


def test_no_more_runs_than_allowed() -> None:
    runs: list[list[int]] = []

    def fails(part: list[int]) -> bool:
        runs.append(part)
        return {3, 17} <= set(part)

    found = shorten(range(20), fails, most_runs=5)
    assert len(runs) == 5
    assert {3, 17} <= set(found)


def test_a_single_fault_is_not_run_again() -> None:
    assert shorten(["only"], lambda part: False, most_runs=10) == ["only"]
