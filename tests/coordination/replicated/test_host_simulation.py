"""The replicated store in the simulation of hosts, and mutations that the simulation must find."""

from __future__ import annotations

import pytest

from outlast.testing.hosts.schedule import HostSchedule
from outlast.testing.hosts.simulate import HostsResult, simulate_hosts

_CHUNK = 500


def _vary(results: list[HostsResult]) -> None:
    """The schedules are varied: leaders change, hosts are lost and leave, some runs end."""
    assert sum(r.leaders > 1 for r in results) > len(results) / 4
    assert sum(r.lost > 0 for r in results) > len(results) / 5
    assert sum(r.left > 0 for r in results) > len(results) / 10
    assert sum(r.snapshots > 3 for r in results) > len(results) / 4
    assert sum(r.failed > 0 for r in results) > len(results) / 10
    assert sum(r.progress for r in results) > len(results) / 3


def test_no_schedule_breaks_what_must_hold() -> None:
    _vary([simulate_hosts(seed) for seed in range(60)])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 10_100, _CHUNK))
def test_no_schedule_of_many_breaks_what_must_hold(first: int) -> None:
    _vary([simulate_hosts(seed) for seed in range(first, first + _CHUNK)])


def test_the_same_seed_gives_the_same_run() -> None:
    for seed in range(5):
        assert simulate_hosts(seed) == simulate_hosts(seed)


def test_without_faults_one_leader_answers_everything() -> None:
    quiet = HostSchedule(hosts=4, crashes=0, pauses=0, cuts=0, joins=0, faults_s=5.0)
    for seed in range(5):
        result = simulate_hosts(seed, quiet)
        assert (result.leaders, result.lost, result.left, result.failed) == (1, 0, 0, 0)
        assert result.progress
