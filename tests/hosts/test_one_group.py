"""H4: two groups of one run never train at once, whatever the endpoints are. H5: when a majority is
connected again, training goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from network import Network

from hosts.cluster import Cluster, Started

pytestmark = pytest.mark.slow

OPTIONS = ("--nnodes=2:3", "--replacement-timeout=1")


@pytest.fixture
def five(_allowed: None) -> Iterator[Network]:
    with Network([f"h{number}" for number in range(1, 6)]) as network:
        yield network


def _train(five: Network, folder: Path) -> tuple[Cluster, dict[str, Started]]:
    """The endpoints h1, h2 and h3 train; h4 and h5 are spares."""
    cluster, agents = Cluster(five, folder), {}
    for names in (five.names[:3], five.names[3:]):
        agents |= {name: cluster.agent(name, *OPTIONS) for name in names}
        for name in names:
            cluster.until_said("leads the hosts", agents[name])
    cluster.until_step(20, size=3)
    return cluster, agents


def test_a_minority_with_most_endpoints_founds_no_group(
    five: Network, tmp_path: Path, weights: str
) -> None:
    cluster, agents = _train(five, tmp_path)
    five.part(["h2", "h3"], ["h1", "h4", "h5"])
    for name in ("h2", "h3"):
        cluster.until_said("takes no part in the job any longer", agents[name])
    cluster.until_step(1, 1)
    # Both know each other, and are two of three endpoints. They wait for the others, and say so.
    for name in ("h2", "h3"):
        cluster.until_said("the last group of this run may still act", agents[name])
    assert not any(cluster.training(name) for name in ("h2", "h3"))
    cluster.check_views()
    five.heal()
    cluster.until_said("leads the hosts(?s:.*)leads the hosts", agents["h2"])
    cluster.go()
    assert cluster.wait() == [0] * 5, cluster.output()
    cluster.check(weights)


def test_all_hosts_go_on_after_most_have_lost_their_power(
    five: Network, tmp_path: Path, weights: str
) -> None:
    cluster, agents = _train(five, tmp_path)
    lost = ["h1", "h2", "h3"]
    for name in lost:
        five[name].power_off()
    for name in ("h4", "h5"):
        cluster.until_said("takes no part in the job any longer", agents[name])
    before = len(cluster.steps())
    again = []
    for name in lost:
        agents[name].process.wait()
        five.boot(name)
        again.append(cluster.agent(name, *OPTIONS))
    cluster.until(lambda: len(cluster.steps()) > before + 10, "training after the hosts are back")
    cluster.go()
    assert cluster.wait(*again, agents["h4"], agents["h5"]) == [0] * 5, cluster.output()
    cluster.check(weights, first=before)


def test_when_two_groups_meet_the_hosts_of_one_join_the_other(
    five: Network, tmp_path: Path, weights: str
) -> None:
    """Two groups, which only endpoints that have lost their disks can found: the younger one waits
    for the folder of the checkpoints instead of ending with 93.
    """
    cluster, agents = _train(five, tmp_path)
    before = len(cluster.steps())
    five.part(["h2", "h3"], ["h1", "h4", "h5"])
    again = []
    for name in ("h2", "h3"):
        five[name].power_off()
        agents[name].process.wait()
    for record in (tmp_path / "records").iterdir():
        record.unlink()
    for name in ("h2", "h3"):
        five.boot(name)
    five.part(["h2", "h3"], ["h1", "h4", "h5"])
    again = [cluster.agent(name, *OPTIONS) for name in ("h2", "h3")]
    cluster.until_said("training waits until that job ends, or both have met", *again)
    kept = [agents[name] for name in ("h1", "h4", "h5")]
    five.heal()
    cluster.until_said("takes no part in the job any longer: there is another group", *again)
    for agent in again:
        cluster.until_said("this one is a spare", agent)
    cluster.go()
    assert cluster.wait(*kept, *again) == [0] * 5, cluster.output()
    assert not any(step.host in ("h2", "h3") for step in cluster.steps()[before + 50 :])
    cluster.check(weights)
