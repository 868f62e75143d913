"""Founding and joining in the simulation of launchers, and mutations that it must find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from inprocess.mutations import mutate
from outlast.launch.hosts.replicated.founding import Founding
from outlast.launch.hosts.replicated.joining import Joining
from outlast.launch.hosts.replicated.membership import Membership
from outlast.testing.hosts.founding import FoundingResult, FoundingSchedule, simulate_founding

_CHUNK = 500


def _vary(results: list[FoundingResult]) -> None:
    """The schedules are varied: groups end and are founded again, hosts are cut off, some wait."""
    assert sum(r.groups > 1 for r in results) > len(results) / 5
    assert sum(r.together for r in results) > len(results) / 2
    if len(results) < _CHUNK:
        return
    reached = sum((Counter(r.sometimes) for r in results), Counter[str]())
    assert set(reached) >= {
        *("granted", "granted again", "founded", "admitted", "service over"),
        *("power lost at a write", "ended by peer", "gave up"),
        *("waited for a host that is away", "a slow disk"),
    }


def test_no_schedule_lets_two_groups_act_or_keeps_the_hosts_apart() -> None:
    _vary([simulate_founding(seed) for seed in range(100)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [100, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (600, 1100))]
)
def test_no_schedule_of_many_lets_two_groups_act(first: int) -> None:
    _vary([simulate_founding(seed) for seed in range(first, first + _CHUNK)])


def test_the_same_seed_gives_the_same_run() -> None:
    for seed in range(3):
        assert simulate_founding(seed) == simulate_founding(seed)


@pytest.mark.parametrize("endpoints", [1, 2, 3, 4, 5])
def test_without_faults_one_group_is_founded(endpoints: int) -> None:
    quiet = FoundingSchedule(endpoints=endpoints, kills=0, power_losses=0, cuts=0)
    result = simulate_founding(7, quiet)
    assert (result.groups, result.together) == (1, True)


# A function, a text in its source, and the replacement.
Mutation = tuple[Callable[..., Any], str, str]

# Each with a seed to begin with, and what must be found. Some need hundreds of seeds, so the search
# begins shortly before one that finds it.
MUTATIONS: dict[str, tuple[int, str, list[Mutation]]] = {
    "a grant is not durable": (
        2770,
        "have the grant",
        [
            (
                Founding.asked,
                "self._record.set(known.with_group(group))",
                "self._record.past = known.with_group(group)",
            ),
        ],
    ),
    "a configuration counts before it is on disk": (
        500,
        "have the grant|has a lease in the group of",
        [
            (
                Membership._keep_voters,
                "self._record.set_later(past, lambda: self._loop.call_from_thread(wrote))",
                "self._record.set_later(past, lambda: None); wrote()",
            ),
        ],
    ),
    "an endpoint grants to all that ask": (
        60,
        "have the grant|are here",
        [
            (Founding.asked, "if given is None or (", "if True or ("),
            (Founding.would_grant, "if given is not None and given.host != host", "if False"),
        ],
    ),
    "a group is founded without the grants of a quorum": (
        30,
        "has a lease in the group of",
        [
            (Founding.founds, "and self._quorum.is_quorum(granted)", ""),
        ],
    ),
    "a voter is out when it has been silent": (
        1045,
        "have the grant|has a lease in the group of",
        [
            (
                Joining._learn,
                "if not follows or host == peer.host.id",
                "if host == peer.host.id",
            ),
        ],
    ),
    "the silence is shorter than a lease": (
        65,
        "has a lease in the group of",
        [
            (Founding._silence, "return max(SILENCE_S, self._lost_after_s)", "return 0.1"),
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulation_of_launchers_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, found, mutations = MUTATIONS[name]
    for mutation in mutations:
        mutate(monkeypatch, *mutation)
    with pytest.raises(AssertionError, match=rf"({found})(?s:.*)\nseed \d+: FoundingSchedule\("):
        for seed in range(first, first + 3000):
            simulate_founding(seed)
