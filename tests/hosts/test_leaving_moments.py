"""A host is told to leave at any moment of a training; and how else it can be told."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from network import Network

from hosts.cluster import SHARDED, Cluster, Started
from hosts.test_leaving import SLOW, check_no_step_twice, drain, tell

pytestmark = pytest.mark.slow
TOKEN = "0123456789abcdef" * 4


def start(
    cluster: Cluster, *options: str, hosts: int = 4, env: dict[str, str] | None = None
) -> dict[str, Started]:
    """Starts the launchers of `sharded.py`: the last host is a spare."""
    names = list(cluster.network.names)[:hosts]
    return {n: cluster.agent(n, *options, script=SHARDED, args=SLOW, env=env) for n in names}


def finish(cluster: Cluster, agents: dict[str, Started], weights: str) -> None:
    cluster.go()
    assert cluster.wait(*agents.values()) == [0] * len(agents), cluster.output()
    cluster.check(weights)
    assert re.search(r"job completed.*1 move", cluster.output()), cluster.output()


@pytest.mark.parametrize(
    "moment",
    [
        "evaluation",
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("save", "restore", "held")),
    ],
)
def test_a_host_is_drained_in_the_middle_of(
    four: Network, tmp_path: Path, sharded_weights: str, moment: str
) -> None:
    cluster = Cluster(four, tmp_path)
    mark, plan = tmp_path / "moment", tmp_path / "plan.json"
    faults = {
        "save": {"rank": 2, "kind": "slow_disk", "step": 20, "phase": "writing", "seconds": 6},
        "restore": {"rank": 2, "kind": "exception", "step": 20},
        "held": {"rank": 2, "kind": "sigkill", "step": 30},
    }
    fired = tmp_path / "fired"
    env = {"MOMENT": f"{moment}:{mark}", "OUTLAST_CHAOS_STATE": str(fired)}
    fired.mkdir()
    options = ["--nnodes=3"]
    if moment in faults:
        plan.write_text(json.dumps({"faults": [faults[moment]]}))
        options.append(f"--chaos={plan}")
    agents = start(cluster, *options, env=env)
    begun = (lambda: list(fired.iterdir())) if moment == "save" else mark.exists
    cluster.until(begun, f"the {moment}")
    leaves = cluster.host_of(1)
    other = next(name for name in four.names if name != leaves)
    assert cluster.wait(drain(cluster, other, leaves)) == [0], cluster.output()
    cluster.until_said(rf"host {leaves}\b.* leave", *agents.values())
    mark.with_suffix(".over").touch()
    assert cluster.wait(agents[leaves]) == [0], cluster.output()
    finish(cluster, agents, sharded_weights)
    if moment != "held":  # where the shards of the killed rank come from a checkpoint
        check_no_step_twice(cluster)


def test_the_host_of_a_straggler_leaves(
    four: Network, tmp_path: Path, sharded_weights: str
) -> None:
    cluster = Cluster(four, tmp_path)
    env = {"STRAGGLER": "h2"}
    agents = start(cluster, "--nnodes=3", hosts=3, env=env)
    cluster.until_step(1)
    agents["h4"] = cluster.agent("h4", "--nnodes=3", script=SHARDED, args=SLOW, env=env)
    assert cluster.wait(agents["h2"]) == [0], cluster.output()
    assert "it is a straggler" in agents["h2"].output
    finish(cluster, agents, sharded_weights)
    check_no_step_twice(cluster)


def test_with_on_signal_stop_a_signal_to_one_launcher_stops_the_job(
    four: Network, tmp_path: Path
) -> None:
    cluster = Cluster(four, tmp_path)
    agents = start(cluster, "--nnodes=3", "--on-signal=stop")
    cluster.until_step(10, size=3)
    tell(agents[cluster.host_of(1)], signal.SIGTERM)
    assert cluster.wait(*agents.values()) == [143] * 4, cluster.output()
    assert "job stopped by SIGTERM: saved" in cluster.output()
    assert "move" not in cluster.output()


def test_outlast_drain_needs_the_secret_of_the_job(
    network: Network, tmp_path: Path, weights: str
) -> None:
    cluster = Cluster(network, tmp_path)
    env = {"OUTLAST_TOKEN": TOKEN}
    agents = {n: cluster.agent(n, "--nnodes=2:3", args=SLOW, env=env) for n in network.names}
    cluster.until_step(10, size=3)
    leaves, other = cluster.host_of(1), cluster.host_of(2)
    wrong = cluster.start(other, drain_command(leaves))
    assert cluster.wait(wrong) == [1]
    assert "secret" in wrong.output
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    asked = cluster.start(other, [*drain_command(leaves), "--token-file", str(file)])
    assert cluster.wait(asked, agents[leaves]) == [0, 0], cluster.output()
    assert "leave" not in wrong.output
    cluster.go()
    assert cluster.wait(*agents.values()) == [0] * 3, cluster.output()
    cluster.check(weights)
    check_no_step_twice(cluster)


def drain_command(host: str) -> list[str]:
    endpoints = ",".join(f"h{number}:29400" for number in (1, 2, 3))
    run = ["-m", "outlast.launch", "drain", host, "--rdzv-id", "test"]
    return [*run, "--rdzv-endpoint", endpoints]


def test_a_host_with_a_replica_of_shards_leaves(
    network: Network, tmp_path: Path, hsdp_weights: str
) -> None:
    cluster = Cluster(network, tmp_path)
    options = ("--nnodes=2", "--nproc-per-node=2")
    agents = start(cluster, *options, hosts=3, env={"HSDP": "1"})
    cluster.until_step(10, size=4)
    leaves = cluster.host_of(3)
    assert cluster.wait(drain(cluster, leaves, leaves), agents[leaves]) == [0, 0], cluster.output()
    finish(cluster, agents, hsdp_weights)
    check_no_step_twice(cluster)


@pytest.mark.exhaustive
def test_a_host_that_has_just_taken_a_place_leaves_when_its_ranks_have_come(
    five: Network, tmp_path: Path, sharded_weights: str
) -> None:
    cluster = Cluster(five, tmp_path)
    mark = tmp_path / "moment"
    agents = start(cluster, "--nnodes=3", env={"MOMENT": f"held:{mark}"})
    cluster.until_step(30, size=3)
    lost, train = cluster.host_of(2), {step.host for step in cluster.steps()}
    takes = next(name for name in agents if name not in train)
    five[lost].power_off()
    cluster.until(mark.exists, "the import of the replacement")
    agents["h5"] = cluster.agent("h5", "--nnodes=3", script=SHARDED, args=SLOW)
    cluster.until_said("joined: .*h5", agents["h5"])
    asked = drain(cluster, cluster.host_of(0), takes)
    cluster.until_said(rf"host {takes}\b.* leave", *agents.values())
    mark.with_suffix(".over").touch()
    assert cluster.wait(asked, agents[takes]) == [0, 0], cluster.output()
    del agents[lost]
    finish(cluster, agents, sharded_weights)
    assert {step.size for step in cluster.steps()} == {3}
