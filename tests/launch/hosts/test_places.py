"""Which host has which place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.coordination.replicated.hosts import HostInfo
from outlast.launch.hosts.plan import PlaceConflict, assign


def host(name: str, place: int = -1) -> HostInfo:
    return HostInfo(id=name, name=name, address=f"10.0.0.{len(name)}", store_port=1, place=place)


NAMES = st.lists(st.sampled_from("abcdefgh"), unique=True)


@given(before=NAMES, there=NAMES, maximum=st.integers(1, 8))
def test_survivors_stay_and_come_first(before: list[str], there: list[str], maximum: int) -> None:
    places = assign(before, [host(name) for name in there], maximum)
    assert len(places) == len(set(places)) == min(len(there), maximum)
    assert set(places) <= set(there)
    survivors = [name for name in before if name in there]
    assert set(survivors[:maximum]) <= set(places)  # no spare takes the place of a survivor
    for place, name in enumerate(before[: len(places)]):
        if name in places:
            assert places[place] == name
    newcomers = [name for name in places if name not in before]
    assert newcomers == [name for name in there if name in newcomers]  # in the order of joining


@given(names=NAMES, maximum=st.integers(1, 8))
def test_the_first_places_are_in_the_order_of_joining(names: list[str], maximum: int) -> None:
    assert assign((), [host(name) for name in names], maximum) == tuple(names[:maximum])


def test_places_as_asked() -> None:
    hosts = [host("a", 1), host("b", 0)]
    assert assign((), hosts, 2, asked=True) == ("b", "a")
    with pytest.raises(PlaceConflict, match="hosts a and c both have --node-rank 1"):
        assign((), [*hosts, host("c", 1)], 2, asked=True)
    with pytest.raises(PlaceConflict, match="host d has --node-rank 2, and --nnodes is 2"):
        assign((), [host("d", 2)], 2, asked=True)
