"""Hosts that cannot reach each other: a minority stops, and joins again when the network heals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from network import Network

from hosts.cluster import STEPPING, Cluster

pytestmark = pytest.mark.slow

SMALLER = ("--nnodes=2:3", "--replacement-timeout=1")
Cut = Callable[[Network, str], None]


def _all(network: Network, name: str) -> None:
    network.isolate(name)


def _its_voice(network: Network, name: str) -> None:
    for other in network.names:
        if other != name:
            network.cut(name, other)


def _its_ear(network: Network, name: str) -> None:
    for other in network.names:
        if other != name:
            network.cut(other, name)


@pytest.fixture
def five(_allowed: None) -> Iterator[Network]:
    with Network([f"h{number}" for number in range(1, 6)]) as network:
        yield network


@pytest.mark.parametrize(
    ("cut", "leads"),
    [
        (_all, True),
        (_its_voice, True),
        pytest.param(_its_voice, False, marks=pytest.mark.exhaustive),
        (_its_ear, True),
        pytest.param(_its_ear, False, marks=pytest.mark.exhaustive),
    ],
)
def test_a_host_that_is_cut_off_stops_and_comes_back_as_a_new_host(
    network: Network, tmp_path: Path, weights: str, cut: Cut, leads: bool
) -> None:
    cluster = Cluster(network, tmp_path)
    agents = {name: cluster.agent(name, *SMALLER, args=STEPPING) for name in network.names}
    cluster.until_step(20, size=3)
    leader = cluster.leader()
    lost = leader if leads else next(name for name in network.names if name != leader)
    assert cluster.training(lost)
    cut(network, lost)
    cluster.until_step(1, 1, size=2)
    assert not cluster.training(lost)  # its workers ended before
    assert not any(step.host == lost for step in cluster.steps() if step.iteration > 0)
    cluster.until_said("takes no part in the job any longer", agents[lost])
    network.heal()
    cluster.until_step(30, 2, size=3)
    cluster.go()
    assert cluster.wait() == [0, 0, 0], cluster.output()
    cluster.check(weights)


def test_when_no_host_reaches_another_all_stop_and_meet_again_when_the_network_heals(
    network: Network, tmp_path: Path, weights: str
) -> None:
    cluster = Cluster(network, tmp_path)
    agents = [cluster.agent(name, *SMALLER) for name in network.names]
    cluster.until_step(20, size=3)
    network.isolate(*network.names[:1])
    network.isolate(*network.names[1:2])
    for agent in agents:
        cluster.until_said("takes no part in the job any longer", agent)
    cluster.check_views()
    before = len(cluster.steps())
    network.heal()
    cluster.until(lambda: len(cluster.steps()) > before + 10, "training after the network healed")
    cluster.go()
    assert cluster.wait() == [0, 0, 0], cluster.output()
    cluster.check(weights, first=before)


@pytest.mark.parametrize(
    "leader_on",
    [pytest.param("smaller side", marks=pytest.mark.exhaustive), "larger side"],
)
def test_of_two_sides_the_smaller_stops_and_its_hosts_come_back_when_the_network_heals(
    five: Network, tmp_path: Path, weights: str, leader_on: str
) -> None:
    cluster = Cluster(five, tmp_path)
    options = ("--nnodes=3:5", "--replacement-timeout=1")
    agents = {name: cluster.agent(name, *options, args=STEPPING) for name in five.names}
    cluster.until_step(20, size=5)
    leader = cluster.leader()
    others = [name for name in five.names if name != leader]
    smaller = [leader, others[-1]] if leader_on == "smaller side" else others[-2:]
    assert all(cluster.training(name) for name in smaller)
    five.isolate(*smaller)
    cluster.until_step(1, 1, size=3)
    assert not any(cluster.training(name) for name in smaller)  # their workers ended before
    for name in smaller:
        cluster.until_said("takes no part in the job any longer", agents[name])
    assert not any(s.host in smaller for s in cluster.steps() if s.iteration > 0)
    assert (cluster.leader() == leader) == (leader_on == "larger side")
    five.heal()
    cluster.until_step(30, 2, size=5)
    cluster.go()
    assert cluster.wait() == [0] * 5, cluster.output()
    cluster.check(weights)
