"""After the death of a leader no survivor's lease ends: H1, with the product's own durations."""

from __future__ import annotations

import random

import pytest

from inprocess.mutations import mutate
from outlast.coordination.replicated.election import Election
from outlast.coordination.replicated.quorum import Timing
from outlast.coordination.replicated.voter import Voter
from simulation.hosts.schedule import HostSchedule
from simulation.hosts.simulate import HostSimulation

SEEDS = 60


def _all_vote(sim: HostSimulation, hosts: int) -> bool:
    names = set(sim.hosts)
    return len(names) == hosts and all(
        host.node.voters == names and host.lease_end() > 0 for host in sim.hosts.values()
    )


def survives(seed: int, hosts: int, lag_s: float) -> bool:
    """Whether all leases of the others last after the leader has died. For `lag_s` before that, one
    voter is cut off, so that its log lags.
    """
    r = random.Random(seed)
    schedule = HostSchedule(
        operations=1000,
        latency_s=r.choice([0.001, 0.02, 0.05]),
        kept=r.choice([2, 4, 100]),
        timing=Timing(5.0),
    )
    sim = HostSimulation(seed, schedule)
    sim.start_host(founding=True)
    for _ in range(hosts - 1):
        sim.at(r.random(), sim.start_host)
    while not _all_vote(sim, hosts):
        assert sim.now < 60, "not all hosts have become voters"
        sim.run(sim.now + 0.25)
    sim.run(sim.now + 3 * r.random())
    leader = next(host for host in sim.hosts.values() if host.node.leads)
    survivors = [host for host in sim.hosts.values() if host is not leader]
    if lag_s:
        apart = survivors[0].name
        links = {(apart, other) for other in sim.hosts if other != apart}
        sim.cut = links | {(b, a) for a, b in links}
        sim.run(sim.now + lag_s)
        sim.cut = set()
    leader.alive = False
    end = sim.now + 3 * sim.timing.lease
    while sim.now < end:
        sim.run(sim.now + 0.05)
        if any(host.lease_end() <= sim.now for host in survivors):
            return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))])
@pytest.mark.parametrize("lag_s", [0.0, pytest.param(0.9, marks=pytest.mark.slow)])
def test_the_death_of_the_leader_ends_no_other_lease(hosts: int, lag_s: float) -> None:
    assert [seed for seed in range(SEEDS) if not survives(seed, hosts, lag_s)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "text", "replacement"),
    [
        pytest.param(
            Voter.answer_vote, "asked.term if granted else self.term", "asked.term", id="denied"
        ),
        pytest.param(Election.precedes, "young and", "False and", id="split"),
    ],
)
def test_without_it_a_lease_ends(
    function: object, text: str, replacement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, function, text, replacement)  # type: ignore[arg-type]
    cases = [(seed, hosts, lag) for seed in range(300) for hosts in (3, 5) for lag in (0.0, 0.9)]
    assert not all(survives(*case) for case in cases)
