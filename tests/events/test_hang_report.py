"""Which of several hung ranks the others waited for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from outlast.events.restart_causes import hung_ranks
from outlast.events.types import Fault


def monitor(member: int, **fields: Any) -> Fault:
    """The report of a rank's monitor process."""
    return Fault(member=member, rank=member, interruption="SOFT_TIMEOUT", **fields)


def rank(member: int, waits: bool = False, pings: int = 5, collectives: int = 9) -> Fault:
    """A rank's own report."""
    return monitor(member, own_report=True, consequence=waits, pings=pings, collectives=collectives)


def echo(member: int) -> Fault:
    """A closed connection, on a rank that waited."""
    return Fault(member=member, rank=member, interruption="EXCEPTION", consequence=True)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param([rank(0, waits=True), rank(1, waits=True), rank(2)], id="in user code"),
        pytest.param([rank(0), rank(1), rank(2, collectives=8)], id="fewer collectives"),
        pytest.param(
            [rank(0, waits=True, collectives=3), rank(1), rank(2, collectives=8)],
            id="who waits is not compared",
        ),
        pytest.param([rank(0), rank(1), rank(2, pings=4)], id="fewer pings"),
        pytest.param(
            [monitor(0, pings=1), echo(0), rank(1, waits=True), rank(2)],
            id="woken by the end of a connection",
        ),
        pytest.param(
            [rank(0, waits=True), monitor(0, pings=1), rank(1, waits=True), rank(2)],
            id="a monitor that speaks after its rank",
        ),
        pytest.param(
            [
                rank(0, waits=True, pings=4),
                rank(1, waits=True, pings=4),
                rank(2, waits=True, pings=3),
            ],
            id="all wait",
        ),
    ],
)
def test_the_cause_comes_first_in_any_order_of_reports(said: list[Fault]) -> None:
    for faults in itertools.permutations(said):
        hung = hung_ranks(faults)
        assert hung[0].member == 2
        assert sorted(fault.member for fault in hung) == [0, 1, 2][-len(hung) :]
        assert all(fault.consequence or fault.pings >= hung[0].pings for fault in hung[1:])


def test_a_rank_ahead_of_another_is_a_consequence() -> None:
    assert [f.consequence for f in hung_ranks([rank(0), rank(1, collectives=8)])] == [False, True]


def test_other_faults_are_none_of_them() -> None:
    assert hung_ranks([echo(0), Fault(member=1, interruption="TERMINATED")]) == []
