"""Founding and joining in the simulation of launchers, and mutations that it must find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inprocess.mutations import mutate
from outlast.launch.hosts.replicated.founding import Founding
from outlast.launch.hosts.replicated.joining import Joining
from outlast.launch.hosts.replicated.membership import Membership
from simulation.hosts.founding import (
    FoundingResult,
    FoundingSchedule,
    FoundingSimulation,
    Machine,
    simulate_founding,
)

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
        *("waited for a host that is away", "a slow disk", "a full disk"),
    }


def test_no_schedule_lets_two_groups_act_or_keeps_the_hosts_apart() -> None:
    _vary([simulate_founding(seed) for seed in range(100)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [100, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (600, 1100))]
)
@pytest.mark.exhaustive
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


@contextmanager
def _three(folder: Path, endpoints: int) -> Iterator[FoundingSimulation]:
    """Three hosts, of which the first has founded a group, and no fault."""
    plan = FoundingSchedule(hosts=3, endpoints=endpoints, kills=0, power_losses=0, cuts=0)
    world = FoundingSimulation(3, plan, str(folder))
    try:
        yield world
    finally:
        for machine in world.machines:
            machine.kill()


def test_a_record_that_could_not_be_written_lets_no_second_group_act(tmp_path: Path) -> None:
    with _three(tmp_path, endpoints=1) as world:
        first, *others = world.machines
        first.start()
        world.run(4.0)
        first.disk_full = True
        for machine in others:
            machine.start()
        world.run(20.0)
        first.disk_full = False
        world.run(60.0)
        assert world.together()
        for machine in others:
            world.cut |= {(first.name, machine.name), (machine.name, first.name)}
        first.kill()
        first.start()
        world.run(100.0)  # in which no second group may have a lease
        assert first.launcher is not None
        assert "have not been heard of" in first.launcher.problem()


@pytest.mark.parametrize("disk_s", [0.01, 6.0, 60.0])
def test_no_survivor_loses_its_lease_while_a_change_of_voters_waits_for_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk_s: float
) -> None:
    with _three(tmp_path, endpoints=3) as world:
        leader, *survivors = world.machines
        leader.start()
        world.run(10.0)
        for machine in survivors:
            machine.start()
        world.run(30.0)
        assert world.together()
        monkeypatch.setattr(world, "disk_s", lambda machine: disk_s)
        world.machines.append(Machine(world, 3, str(tmp_path)))
        world.machines[-1].start()
        world.run(32.0)
        launchers = [machine.launcher for machine in survivors]
        leader.kill()
        world.run(60.0)
        assert [machine.launcher for machine in survivors] == launchers
        assert all(x is not None and x.lease_end > world.now for x in launchers)


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
@pytest.mark.parametrize(
    "name",
    [
        name if number < 1 else pytest.param(name, marks=pytest.mark.exhaustive)
        for number, name in enumerate(MUTATIONS)
    ],
)
@pytest.mark.exhaustive
def test_the_simulation_of_launchers_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, found, mutations = MUTATIONS[name]
    for mutation in mutations:
        mutate(monkeypatch, *mutation)
    with pytest.raises(AssertionError, match=rf"({found})(?s:.*)\nseed \d+: FoundingSchedule\("):
        for seed in range(first, first + 3000):
            simulate_founding(seed)
