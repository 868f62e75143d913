"""Lost hosts whose ranks are replaced on spare hosts cost no step, wherever in a step it was."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from network import Network

from hosts.cluster import Cluster

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "scripts" / "plain_ddp.py"


def train(network: Network, folder: Path, size: int, *stops: str) -> Cluster:
    """Trains on `size` hosts; those whose ranks stop lose power when all are as far as they can."""
    folder.mkdir()
    cluster = Cluster(network, folder)
    args = [f"--stop-at={stop}" for stop in stops]
    agents = [
        cluster.agent(name, f"--nnodes={size}", script=SCRIPT, args=args) for name in network.names
    ]
    lost = []
    for rank, step, point in (stop.split(":") for stop in stops):
        cluster.until((folder / f"stopped-{rank}").exists, f"the stop of rank {rank}")
        # The others complete the step, unless this rank's gradients are missing.
        last = int(step) - (point == "begin")
        away = {int(stop.split(":")[0]) for stop in stops}
        for other in sorted({*range(size)} - away):
            cluster.until(
                lambda other=other, last=last: any(
                    s.rank == other and s.step == last for s in cluster.steps()
                ),
                f"step {last} of rank {other}",
            )
        lost.append(cluster.host_of(int(rank)))
    for name in lost:
        network[name].power_off()
    codes = dict(zip(network.names, cluster.wait(*agents), strict=True))
    assert {name for name, code in codes.items() if code} == set(lost), cluster.output()
    cluster.check_nothing_left()
    return cluster


def weights(cluster: Cluster) -> set[str]:
    return {m[1] for p in cluster.started if (m := re.search(r"weights (\w+)", p.output))}


def check(faulty: Cluster, reference: Cluster, at: int) -> None:
    """No step was made twice, none from a checkpoint, and the weights have the same bits."""
    assert len(weights(faulty)) == 1, faulty.output()
    assert weights(faulty) == weights(reference), faulty.output()
    made = Counter((step.rank, step.step) for step in faulty.steps())
    assert set(made.values()) == {1}, faulty.output()
    restored = re.findall(rf"from step {at} \((\w+)\)", faulty.output())
    assert sorted(set(restored)) == ["live", "replica"], faulty.output()


@pytest.mark.parametrize("stop", ["2:30:begin", "1:30:exchanged", "0:30:stepped"])
def test_a_spare_host_continues_at_the_newest_step(
    four: Network, tmp_path: Path, stop: str
) -> None:
    """The only checkpoint is the one at step 0."""
    reference = train(four, tmp_path / "reference", 3)
    faulty = train(four, tmp_path / "faulty", 3, stop)
    check(faulty, reference, 29 if stop.endswith("begin") else 30)


@pytest.mark.usefixtures("_allowed")
@pytest.mark.exhaustive
def test_two_hosts_that_are_no_neighbors_are_lost_at_once(tmp_path: Path) -> None:
    names = [f"h{number}" for number in range(1, 7)]
    with Network(names) as network:
        reference = train(network, tmp_path / "reference", 4)
    with Network(names) as network:
        faulty = train(network, tmp_path / "faulty", 4, "0:30:exchanged", "2:30:exchanged")
    check(faulty, reference, 30)
