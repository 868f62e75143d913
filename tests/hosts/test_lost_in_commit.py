"""The host that leads, and has rank 0, loses power while rank 0 commits a checkpoint."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from network import Network

from async_checkpoint.staged_writer import PLAN, Plan
from hosts.cluster import Cluster
from outlast.async_checkpoint.storage.directory import list_checkpoints, open_storage, verify
from outlast.async_checkpoint.storage.fence import newest
from outlast.async_checkpoint.storage.manifest import saved_by

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "held_commit.py"
UNCOMMITTED = re.compile(r"\.tmp-step-(\d+)-(\w+)")
KILLED = -signal.SIGKILL


@pytest.mark.parametrize(
    ("moment", "committed"),
    [
        ({"op": "put", "name": "manifest.json", "when": "after"}, False),
        ({"op": "publish", "when": "before"}, False),
        pytest.param({"op": "publish", "when": "after"}, True, marks=pytest.mark.exhaustive),
    ],
    ids=["after the manifest", "before the rename", "after the rename"],
)
def test_the_leader_loses_power_while_a_checkpoint_commits(
    network: Network, tmp_path: Path, weights: str, moment: dict[str, Any], committed: bool
) -> None:
    cluster = Cluster(network, tmp_path)
    plan = Plan(tmp_path / "plan")
    gate = plan.gate()

    def start(name: str) -> None:
        # The only endpoint leads first.
        options = ("--nnodes=2:3", "--replacement-timeout=1", "--rdzv-endpoint", "h1:29400")
        cluster.agent(
            name, *options, script=SCRIPT, args=("--no-live",), env={PLAN: str(plan.folder)}
        )

    start("h1")
    cluster.until_said("h1 leads the hosts")
    start("h2")
    start("h3")
    cluster.until_step(20, size=3)
    assert (cluster.leader(), cluster.host_of(rank=0)) == ("h1", "h1")
    storage = open_storage(str(tmp_path / "state"))
    plan.set({**moment, "do": "wait"})
    gate.arrived()
    plan.set()
    believed = list_checkpoints(storage)[-1].step
    held = [found for name in storage.folders() if (found := UNCOMMITTED.fullmatch(name))]
    assert len(held) == (0 if committed else 1)
    assert all(int(one[1]) > believed for one in held)
    network["h1"].power_off()
    cluster.until_step(1, 1, size=2)
    assert int(cluster.until_said(r"restored step (\d+) from")[1]) == believed
    cluster.go()
    assert sorted(cluster.wait()) == [KILLED, 0, 0], cluster.output()
    cluster.check(weights)
    fence = newest(storage)
    assert fence is not None
    for one in held:
        assert one[2] in fence.refused  # the host may have been frozen only
        assert not any(one[2] in name for name in storage.folders())
    for found in list_checkpoints(storage):
        verify(storage, found.step)
        assert saved_by(storage, found.folder) not in fence.refused
