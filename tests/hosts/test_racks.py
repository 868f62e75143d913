"""All hosts of a rack lose power: their snapshots are restored from copies in the other rack."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from network import Network

from hosts.cluster import Cluster

pytestmark = pytest.mark.slow


def copied(cluster: Cluster) -> set[int]:
    """The ranks whose snapshot of step 30, or a later one, is in the memory of another host."""
    found = set()
    for log in cluster.events.rglob("*.jsonl"):
        for line in log.read_text().splitlines(keepends=True):
            if "copy_completed" in line and line.endswith("\n"):
                event = json.loads(line)
                if event["kind"] == "copy_completed" and event["step"] >= 30:
                    found.add(event["rank"])
    return found


@pytest.mark.exhaustive
def test_what_a_lost_rack_had_in_memory_is_restored_from_copies_in_another(
    four: Network, tmp_path: Path, weights: str
) -> None:
    racks = {"h1": "a", "h2": "a", "h3": "b", "h4": "b"}
    cluster = Cluster(four, tmp_path)

    def start(name: str) -> None:
        env = {"OUTLAST_FAILURE_DOMAIN": racks[name]}
        cluster.agent(name, "--nnodes=4", args=("--replicas=1", "--no-live"), env=env)

    for name in racks:
        start(name)
    cluster.until_step(35, size=4)
    cluster.until(lambda: copied(cluster) == {0, 1, 2, 3}, "the copies of a step")
    # A majority: of an even number of hosts, the leader counts twice.
    lost = [name for name, rack in racks.items() if rack != racks[cluster.leader()]]
    for name in lost:
        four[name].power_off()
        four.boot(name)
        start(name)
    cluster.until_step(1, 1, size=4)
    cluster.until_said(r"restored step \d+ from [^s]")  # not from storage
    cluster.go()
    killed = -signal.SIGKILL
    assert sorted(cluster.wait()) == [killed, killed, 0, 0, 0, 0], cluster.output()
    cluster.check(weights)
