"""Which host has which place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from outlast.coordination.replicated.hosts import HostInfo
from outlast.launch.hosts.places import PlaceConflict, assign


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


KEYS = st.sampled_from([(), ("r1",), ("r2", "9"), ("r2", "10"), ("r10",)])
ORDER = [("r1",), ("r2", "9"), ("r2", "10"), ("r10",), ()]


@given(
    before=NAMES, there=st.dictionaries(st.sampled_from("abcdefgh"), KEYS), most=st.integers(1, 8)
)
def test_new_hosts_are_in_the_order_of_the_network_and_survivors_stay(
    before: list[str], there: dict[str, tuple[str, ...]], most: int
) -> None:
    hosts = [structs.replace(host(name), topology=key) for name, key in there.items()]
    places = assign(before, hosts, most)
    for place, name in enumerate(before[: len(places)]):
        if name in there:
            assert places[place] == name
    new = [name for name in there if name not in before]
    wanted = sorted(new, key=lambda name: ORDER.index(there[name]))  # stable: joining comes second
    found = [name for name in places if name not in before]
    assert found == wanted[: len(found)]
    assert assign(places, reversed(hosts), most) == places  # the next attempt changes nothing


def test_the_network_does_not_change_places_that_were_asked_for() -> None:
    hosts = [
        structs.replace(host("a", 1), topology=("1",)),
        structs.replace(host("b", 0), topology=("2",)),
    ]
    assert assign((), hosts, 2, asked=True) == ("b", "a")


def test_places_as_asked() -> None:
    hosts = [host("a", 1), host("b", 0)]
    assert assign((), hosts, 2, asked=True) == ("b", "a")
    with pytest.raises(PlaceConflict, match="hosts a and c both have --node-rank 1"):
        assign((), [*hosts, host("c", 1)], 2, asked=True)
    with pytest.raises(PlaceConflict, match="host d has --node-rank 2, and --nnodes is 2"):
        assign((), [host("d", 2)], 2, asked=True)
