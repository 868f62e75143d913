"""Hosts that must not run ranks: a spare takes their places."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from network import Network

from hosts.cluster import Cluster

pytestmark = pytest.mark.slow


def test_a_host_without_shared_memory_is_refused_and_another_takes_its_place(
    network: Network, tmp_path: Path, weights: str
) -> None:
    full = ["mount", "-o", "remount,size=1m", "/dev/shm"]
    assert network["h1"].start(full).wait() == 0
    cluster = Cluster(network, tmp_path)
    options = ("--nnodes=2", "--health-check=quick", "--health-free=0")
    agents = {name: cluster.agent(name, *options) for name in network.names}
    assert cluster.wait(agents["h1"]) == [69]
    cluster.until_said(
        r"host h1 is not healthy, .*/dev/shm: \[Errno 28\] No space left", agents["h1"]
    )
    cluster.until_step(20, size=2)
    cluster.go()
    assert cluster.wait(agents["h2"], agents["h3"]) == [0, 0]
    assert {step.host for step in cluster.steps()} == {"h2", "h3"}
    cluster.check(weights)


def test_a_spare_takes_the_place_of_a_host_whose_ranks_died_too_often(
    network: Network, tmp_path: Path, weights: str
) -> None:
    cluster = Cluster(network, tmp_path)
    options = ("--nnodes=2", "--max-host-faults=2/600")
    agents = {name: cluster.agent(name, *options) for name in network.names}
    cluster.until_step(10, size=2)
    bad = cluster.host_of(1)
    for iteration in range(2):
        cluster.until(lambda at=iteration: _trains(cluster, bad, at), "a step on it")
        os.kill(cluster.training(bad)[0], signal.SIGKILL)
    told = rf"host {bad} .* gets no more ranks: its ranks were the first cause of 2 restarts within"
    cluster.until_said(told, agents[bad])
    assert cluster.wait(agents[bad]) == [69]
    cluster.until_step(1, 3, size=2)
    cluster.go()
    others = [agent for name, agent in agents.items() if name != bad]
    assert cluster.wait(*others) == [0, 0], cluster.output()
    last = max(step.iteration for step in cluster.steps())
    cluster.until_stepped_by(last, {*network.names} - {bad})
    cluster.check(weights)


def _trains(cluster: Cluster, host: str, iteration: int) -> bool:
    made = any(s.host == host and s.iteration >= iteration for s in cluster.steps())
    return made and bool(cluster.training(host))
