"""Each check of a history of a job finds a bad one made by hand, and accepts the good one."""

from __future__ import annotations

from typing import Any

import pytest

from torture.hosts.faults import Fault
from torture.hosts.jobs import LAST_STEP, Segment, check_lineage, check_segments

Segments = dict[Segment, list[dict[str, Any]]]


def _steps(
    host: str, numbers: range, begin: float, rank: int = 0, iteration: int = 0, size: int = 2
) -> Segments:
    """A step each second."""
    said = {"host": host, "rank": rank, "iteration": iteration, "size": size}
    steps = [{**said, "step": n, "time": begin + i} for i, n in enumerate(numbers)]
    return {(f"{host}-{iteration}", host, iteration): steps}


def _frozen(host: str) -> list[Fault]:
    return [Fault("freeze", 0.0, 1.0, (host,))]


@pytest.mark.parametrize(
    ("second", "allowed"),
    [
        (_steps("h2", range(1, 10), 0.5, rank=1), True),
        (_steps("h2", range(1, 10), 0.5, rank=0), False),  # two halves of the network
        (_steps("h2", range(5, 10), 3.5, rank=1, iteration=1), False),
        (_steps("h2", range(5, 10), 9.5, rank=1, iteration=1), True),
        (_steps("h2", range(5, 10), 3.5, rank=1, size=3), False),
    ],
)
def test_two_views_at_a_time(second: Segments, allowed: bool) -> None:
    first = _steps("h1", range(1, 10), 0.0)
    assert bool(check_segments(first | second, [])) != allowed


def test_only_a_frozen_host_may_finish_its_last_step_late() -> None:
    first, second = _steps("h1", range(1, 6), 0.0), _steps("h2", range(5, 9), 3.5, iteration=1)
    assert check_segments(first | second, _frozen("h2"))
    assert not check_segments(first | second, _frozen("h1"))


def test_every_step_is_once_in_the_final_lineage() -> None:
    last = LAST_STEP + 1
    assert not check_lineage(_steps("h1", range(1, last), 0.0))
    again = _steps("h2", range(40, last), 50.0, iteration=1)
    assert not check_lineage(_steps("h1", range(1, 50), 0.0) | again)
    skipped = _steps("h2", range(51, last), 50.0, iteration=1)
    assert "[50]" in check_lineage(_steps("h1", range(1, 50), 0.0) | skipped)[0]
    stale = _steps("h2", range(40, 45), 300.0, iteration=1)  # a view that was left behind
    (found,) = check_lineage(_steps("h1", range(1, last), 0.0) | stale)
    assert found == "step 44 was made again, and step 45 was not"
