"""Ranks started by hand on three hosts, without a launcher: a host that is cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
from network import Network

from hosts.cluster import Cluster

SCRIPT = Path(__file__).parent / "scripts" / "short_heartbeats.py"


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_left_behind_and_leaves_when_the_network_heals(
    network: Network, tmp_path: Path, weights: str
) -> None:
    cluster = Cluster(network, tmp_path)
    ranks = [cluster.rank(f"h{i + 1}", i, 3, SCRIPT) for i in range(3)]
    cluster.until_step(10, size=3)
    network.isolate("h3")
    cluster.until_step(20, iteration=1, size=2)
    network.heal()
    cluster.until_said("RankLostError", ranks[2])
    assert cluster.wait(ranks[2]) == [1]
    cluster.go()
    assert cluster.wait(*ranks[:2]) == [0, 0]
    cluster.check(weights, frozen="h3")  # no launcher ends its rank while it is cut off
