"""Placement: a copy is never in the failure domain of its original."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.async_checkpoint.peer_copies.arrangement import Place, holders


def hosts(*sizes: int) -> list[Place]:
    return [Place(f"h{i}", f"h{i}") for i, size in enumerate(sizes) for _ in range(size)]


def test_a_ring_of_hosts() -> None:
    assert holders(hosts(2, 2, 2)) == [2, 3, 4, 5, 0, 1]
    assert holders(hosts(3, 1)) == [3, 3, 3, 0]
    assert holders(hosts(1, 3)) == [1, 0, 0, 0]


def test_racks() -> None:
    places = [Place("a", "r1"), Place("b", "r1"), Place("c", "r2"), Place("d", "r2")]
    assert holders(places) == [2, 3, 0, 1]


def test_one_domain_has_no_copies() -> None:
    assert holders([Place("a", "r"), Place("b", "r")]) is None
    assert holders(hosts(4)) is None


def test_a_host_in_two_domains_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks 0 and 2 are both on host a.*'r1'.*'r2'"):
        holders([Place("a", "r1"), Place("b", "r1"), Place("a", "r2")])


@given(st.lists(st.integers(0, 4), min_size=2, max_size=40))
def test_never_in_the_same_domain_and_evenly(domains: list[int]) -> None:
    places = [Place(f"h{number}", f"d{domain}") for number, domain in enumerate(domains)]
    found = holders(places)
    if len(set(domains)) == 1:
        assert found is None
        return
    assert found is not None
    sizes = Counter(domains)
    for rank, holder in enumerate(found):
        assert domains[rank] != domains[holder]
    for holder, count in Counter(found).items():
        source = {domains[rank] for rank, other in enumerate(found) if other == holder}
        assert len(source) == 1
        assert count <= -(-sizes[source.pop()] // sizes[domains[holder]])
