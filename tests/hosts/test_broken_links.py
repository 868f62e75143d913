"""One link between two hosts is broken, although both reach all others: one of them leaves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from etcd import Etcd
from network import Network

from hosts.cluster import STEPPING, Cluster, Started

# It waits for timeouts of ranks, and the machine may have much to do.
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "short_soft_timeout.py"


def started(network: Network, tmp_path: Path, *options: str) -> tuple[Cluster, dict[str, Started]]:
    cluster = Cluster(network, tmp_path)
    agents = {
        name: cluster.agent(name, *options, script=SCRIPT, args=STEPPING) for name in network.names
    }
    cluster.until_step(20, size=3)
    return cluster, agents


def left_out(cluster: Cluster, agents: dict[str, Started], ends: list[str]) -> str:
    """The end that has left; the launcher of each host has said which link is broken."""
    link = r"host (\w+) \(\S+\) and host (\w+) \(\S+\) do not reach each other"
    found = cluster.until_said(link)
    assert {found[1], found[2]} == set(ends)
    for agent in agents.values():
        assert cluster.until_said(link, agent)[0] == found[0]
    return found[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("both_ways", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_without_a_spare_one_end_leaves_and_comes_back_when_the_link_works(
    network: Network, tmp_path: Path, weights: str, both_ways: bool
) -> None:
    cluster, agents = started(network, tmp_path, "--nnodes=2:3", "--replacement-timeout=1")
    ends = [name for name in network.names if name != cluster.leader()]
    network.cut(*ends)
    if both_ways:
        network.cut(*ends[::-1])
    lost = left_out(cluster, agents, ends)
    assert lost in ends
    last = cluster.until_step(12, 1, size=2).iteration
    assert not any(s.host == lost for s in cluster.steps() if s.iteration == last)
    network.heal()
    cluster.until_said("its links work again", agents[lost])
    cluster.until_step(12, last + 1, size=3)
    cluster.go()
    assert cluster.wait() == [0, 0, 0], cluster.output()
    for agent in agents.values():
        cluster.until_said("broken links between hosts, as they were found:", agent)
    cluster.check(weights)


def test_the_ranks_of_one_end_move_to_a_spare(four: Network, tmp_path: Path, weights: str) -> None:
    cluster, agents = started(four, tmp_path, "--nnodes=3")
    training = {step.host for step in cluster.steps()}
    (spare,) = set(four.names) - training
    ends = sorted(training - {cluster.leader()})[:2]
    four.part(ends[:1], ends[1:])
    lost = left_out(cluster, agents, ends)
    cluster.until_said(rf"host {spare} takes place \d")
    last = cluster.until_step(12, 1, size=3).iteration
    cluster.until_stepped_by(last, {*training, spare} - {lost})
    four.heal()
    cluster.until_said("this one is a spare", agents[lost])
    cluster.go()
    assert cluster.wait() == [0] * 4, cluster.output()
    cluster.check(weights)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd here (Debian: etcd-server)")
def test_with_etcd_one_end_leaves_too(network: Network, tmp_path: Path) -> None:
    etcd = Etcd(network, ["h1"], tmp_path / "etcd")
    etcd.start_all()
    meet = ("--rdzv-backend", "etcd", "--rdzv-endpoint", etcd.endpoints)
    conf = ("--rdzv-conf", "last_call_timeout=5", "--nnodes=2:3", "--replacement-timeout=1")
    cluster, agents = started(network, tmp_path, *meet, *conf)
    network.part(["h2"], ["h3"])
    lost = left_out(cluster, agents, ["h2", "h3"])
    last = cluster.until_step(12, 1, size=2).iteration
    assert not any(s.host == lost for s in cluster.steps() if s.iteration == last)
    network.heal()
    cluster.until_said("its links work again", agents[lost])
    cluster.until_step(12, last + 1, size=3)
    cluster.go()
    assert cluster.wait(*agents.values()) == [0, 0, 0], cluster.output()
    cluster.check_views()
