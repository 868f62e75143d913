"""Each host makes an all-reduce with its neighbors before it runs ranks (`--health-check full`)."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from network import Network

from hosts.cluster import Cluster

pytestmark = pytest.mark.slow

FULL = ("--health-check=full", "--health-free=0")
SPEED = r"checked with neighbors: all-reduce with h\d at [\d.]+ \w?B/s \(cpu:1\)"
FAILS = r"host (h\d) \(\S+\) and host (h\d) \(\S+\) fail the check of neighbors: "
BOTH = r"host (h\d) \(\S+\) and host h\d \(\S+\), h\d \(\S+\) fail the check of neighbors: "

WRONG = """
import sys

if '"side"' in sys.orig_argv[-1]:
    import torch.distributed as dist

    def wrong(tensor, right=dist.all_reduce):
        right(tensor)
        tensor[7] ^= 1

    dist.all_reduce = wrong
"""


@pytest.mark.exhaustive
def test_a_job_begins_once_its_hosts_are_checked_and_a_spare_is_checked_too(
    network: Network, tmp_path: Path, weights: str
) -> None:
    cluster = Cluster(network, tmp_path)
    agents = {name: cluster.agent(name, "--nnodes=2", *FULL) for name in network.names[:2]}
    cluster.until_step(10, size=2)
    for agent in agents.values():
        cluster.until_said(SPEED, agent)
    spare = cluster.agent("h3", "--nnodes=2", *FULL)
    cluster.until_said(SPEED, spare)
    network["h2"].power_off()
    cluster.until_said(r"host h3 takes place \d", spare)
    cluster.until_step(12, 1, size=2)
    cluster.go()
    assert cluster.wait(agents["h1"], spare) == [0, 0], cluster.output()
    cluster.check(weights)


@pytest.mark.exhaustive
def test_a_broken_link_is_found_before_ranks_use_it(
    four: Network, tmp_path: Path, weights: str
) -> None:
    """Two of three hosts do not reach each other: one leaves, and comes back as a spare."""
    cluster = Cluster(four, tmp_path)
    options = ("--nnodes=3", "--health-timeout=30", *FULL)
    four.part(["h3"], ["h4"])
    agents = {name: cluster.agent(name, *options) for name in ("h1", "h3", "h4")}
    found = cluster.until_said(FAILS + r"the all-reduce with h\d has not ended within 30 s")
    assert {found[1], found[2]} == {"h3", "h4"}
    agents["h2"] = cluster.agent("h2", *options)
    cluster.until_step(10, size=3)
    assert {step.host for step in cluster.steps()} == set(agents) - {found[1]}
    four.heal()
    cluster.until_said("its links work again", agents[found[1]])
    cluster.until_said("this one is a spare", agents[found[1]])
    cluster.go()
    assert cluster.wait() == [0] * 4, cluster.output()
    cluster.check(weights)


def test_a_host_that_adds_wrongly_fails_with_both_neighbors(
    four: Network, tmp_path: Path, weights: str
) -> None:
    cluster = Cluster(four, tmp_path)
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "sitecustomize.py").write_text(WRONG)
    env = {"PYTHONPATH": str(tmp_path / "wrong")}
    agents = {
        name: cluster.agent(name, "--nnodes=3:4", *FULL, env=env if name == "h3" else None)
        for name in four.names
    }
    found = cluster.until_said(BOTH + r".*: 5 elements are wrong in 5 sums")
    assert found[1] == "h3", cluster.output()
    cluster.until_step(10, size=3)
    assert {step.host for step in cluster.steps()} == {"h1", "h2", "h4"}
    cluster.until_said("tries to join the job again as a new host in 1 s", agents["h3"])
    agents["h3"].process.send_signal(signal.SIGTERM)
    cluster.go()
    others = [agent for name, agent in agents.items() if name != "h3"]
    assert cluster.wait(*others) == [0, 0, 0], cluster.output()
    cluster.check(weights)
