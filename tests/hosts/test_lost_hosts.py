"""Hosts that lose power: the job goes on, and ends with the weights of a run without faults."""

from __future__ import annotations

import re
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
from etcd import Etcd
from network import Network

from hosts.cluster import Cluster, Started
from outlast.events.report import build, load

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


@pytest.mark.usefixtures("_allowed")
@pytest.mark.parametrize("backend", ["c10d", pytest.param("etcd", marks=pytest.mark.exhaustive)])
def test_by_default_the_job_goes_on_smaller_and_grows_again_each_time(
    tmp_path: Path, weights: str, backend: str
) -> None:
    """Three times: the same place is lost and given up. Twice, a host takes it again."""
    if backend == "etcd" and shutil.which("etcd") is None:
        pytest.skip("no etcd here (Debian: etcd-server)")
    names = ["h1", "h2", "h3"]
    options = ["--nnodes=2:3"]
    slow = ("--pause=2", "--hold-at=1000")  # so that steps are left for all losses
    with Network([*names, "h4"] if backend == "etcd" else names) as network:
        if backend == "etcd":
            etcd = Etcd(network, ["h4"], tmp_path / "etcd")
            etcd.start_all()
            options += ["--rdzv-backend=etcd", "--rdzv-endpoint", etcd.endpoints]
            options += ["--rdzv-conf=last_call_timeout=5"]
        cluster = Cluster(network, tmp_path)
        agents = [cluster.agent(name, *options, args=slow) for name in names]
        cluster.until_step(1, size=3)
        lost = cluster.host_of(rank=0)
        stay = [agent for agent in agents if agent.host != lost]
        for cycle in range(3):
            before = cluster.steps()[-1].iteration
            network[lost].power_off()
            cluster.until_step(1, before + 1, size=2)
            # The leader says at least that the job waits; it waits for a second, and the other
            # may not look within it.
            cluster.until(partial(_said, stay, "waiting for a host for rank", cycle + 1), "wait")
            for agent in stay:
                fewer = partial(_said, [agent], "continues with fewer ranks", cycle + 1)
                cluster.until(fewer, f"fewer ranks {cycle + 1}")
            if cycle < 2:
                before = cluster.steps()[-1].iteration
                network.boot(lost)
                cluster.agent(lost, *options, args=slow)
                cluster.until_step(1, before + 1, size=3)
        cluster.go()
        codes = cluster.wait()
        assert sorted(codes) == [KILLED, KILLED, KILLED, 0, 0], cluster.output()
        said = [m[1] for p in stay if (m := re.search(r"weights (\w+)", p.output))]
        assert said == [weights], cluster.output()
        cluster.check_views()


def _said(agents: list[Started], text: str, times: int) -> bool:
    return max(agent.output.count(text) for agent in agents) >= times


def test_a_host_beyond_the_first_ones_grows_the_job_in_place(
    network: Network, tmp_path: Path, weights: str
) -> None:
    slow = ("--pause=2", "--hold-at=1000")
    cluster = Cluster(network, tmp_path)
    for name in ("h1", "h2"):
        cluster.agent(name, "--nnodes=2:3", args=slow)
    cluster.until_step(1, size=2)
    cluster.agent("h3", "--nnodes=2:3", args=slow)
    cluster.until_step(1, 1, size=3)
    network["h3"].power_off()
    cluster.until_step(1, 2, size=2)
    cluster.go()
    assert sorted(cluster.wait()) == [KILLED, 0, 0], cluster.output()
    for host in ("h1", "h2"):  # they keep their processes
        assert len({step.pid for step in cluster.steps() if step.host == host}) == 1
    cluster.check(weights)
    # Growing costs no step: the new host goes on after the last step of the others.
    report = build(load(cluster.events))
    assert report.restarts[0].redone_steps == 0
    last = max(step.step for step in cluster.steps() if step.iteration == 0)
    assert min(step.step for step in cluster.steps() if step.iteration == 1) > last
