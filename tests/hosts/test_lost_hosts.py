"""Hosts that lose power: the job goes on, and ends with the weights of a run without faults."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from network import Network

from hosts.cluster import Cluster

pytestmark = pytest.mark.slow
KILLED = -signal.SIGKILL


def _replace(cluster: Cluster, host: str, iteration: int) -> None:
    """Ends a host, starts a fresh one in its place, and waits until all hosts train again."""
    before = cluster.steps()[-1].step
    cluster.network[host].power_off()
    cluster.network.boot(host)
    cluster.agent(host, "--nnodes=3")
    cluster.until_step(before - 10, iteration, size=3)


def test_any_host_may_lose_power_and_a_fresh_one_takes_its_place(
    network: Network, tmp_path: Path, weights: str
) -> None:
    cluster = Cluster(network, tmp_path)
    for host in network:
        cluster.agent(host.name, "--nnodes=3")
    cluster.until_step(20, size=3)
    special = (cluster.leader(), cluster.host_of(rank=0))
    _replace(cluster, next(name for name in network.names if name not in special), 1)
    leader = cluster.leader()
    _replace(cluster, leader, 2)  # the host of the store
    assert cluster.leader(term=2) != leader
    _replace(cluster, cluster.host_of(rank=0), 3)
    cluster.go()
    codes = cluster.wait()
    assert sorted(codes) == [KILLED, KILLED, KILLED, 0, 0, 0], cluster.output()
    cluster.check(weights)


def test_without_another_host_the_others_go_on_if_that_is_allowed(
    network: Network, tmp_path: Path, weights: str
) -> None:
    cluster = Cluster(network, tmp_path)
    agents = {
        name: cluster.agent(name, "--nnodes=2:3", "--replacement-timeout=1")
        for name in network.names
    }
    cluster.until_step(20, size=3)
    lost = cluster.leader()
    network[lost].power_off()
    cluster.until_step(30, 1, size=2)
    cluster.go()
    codes = {name: cluster.wait(agent)[0] for name, agent in agents.items()}
    assert codes == {name: KILLED if name == lost else 0 for name in agents}, cluster.output()
    cluster.check(weights)
