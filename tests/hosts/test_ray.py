"""Jobs under a real Ray: a head and three nodes, on hosts in namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from network import Network

from hosts.cluster import TRAIN, Cluster, Started
from hosts.ray_cluster import RayCluster

# Ray takes half a minute to start on two cores.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

DRIVER = Path(__file__).parent / "scripts" / "on_ray.py"


@pytest.fixture
def ray(_allowed: None, tmp_path: Path) -> Iterator[RayCluster]:
    pytest.importorskip("ray", reason="needs the extra `ray`: make test-ray")
    folder = tmp_path / "ray"
    with Network(["c0", "h1", "h2", "h3"]) as network, RayCluster(network, folder) as ray:
        yield ray


def start(ray: RayCluster, cluster: Cluster, hosts: str, *options: str) -> Started:
    arguments = ["--host-timeout=2", "--standby=0", *options, str(TRAIN)]
    where = [ray.address, ray.head.address, hosts]
    return cluster.start(
        "c0", [str(DRIVER), *where, *arguments, *cluster.training_options()], ray.env
    )


def test_a_lost_node_is_replaced_by_another_one(
    ray: RayCluster, tmp_path: Path, weights: str
) -> None:
    cluster = Cluster(ray.network, tmp_path)
    job = start(ray, cluster, "2:2")
    first = cluster.until_step(10, size=2)
    leader = cluster.until_said(r"(h\d) leads the hosts", job)[1]
    # Of two hosts, the one that leads goes on.
    lost = next(step.host for step in cluster.steps() if step.host != leader)
    ray.network[lost].power_off()
    cluster.until_step(first.step, iteration=1, size=2)
    cluster.go()
    assert cluster.wait(job) == [0]
    assert f"weights {weights}" in job.output
    assert {s.host for s in cluster.steps() if s.iteration == 0} >= {lost}
    assert lost not in {s.host for s in cluster.steps() if s.iteration > 0}
    cluster.check_views()


def test_too_few_nodes_are_named(ray: RayCluster, tmp_path: Path) -> None:
    cluster = Cluster(ray.network, tmp_path)
    job = start(ray, cluster, "4:5")
    assert cluster.wait(job) == [1]
    assert "Ray found no 5 nodes with {'CPU': 1} each within" in job.output
    assert ray.network["h1"].address in job.output
