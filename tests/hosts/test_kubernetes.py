"""The manifest for Kubernetes: its commands on hosts in namespaces, run as the kubelet does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from network import Network

from hosts.cluster import EXAMPLE, STEPPING, TRAIN, Cluster

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
MANIFEST = EXAMPLE.parent / "kubernetes" / "train.yaml"


@pytest.fixture
def pods(_allowed: None) -> Iterator[Network]:
    with Network([f"train-{index}.train" for index in range(4)]) as network:
        yield network


def test_a_pod_that_is_to_end_leaves_before_its_signal(
    pods: Network, tmp_path: Path, weights: str
) -> None:
    _, job = yaml.safe_load_all(MANIFEST.read_text())
    (agent,) = job["spec"]["template"]["spec"]["containers"]
    cluster = Cluster(pods, tmp_path)
    ours = {"--nproc-per-node": "1", "--events-dir": cluster.events}
    agents = {}
    for name in pods.names:
        words = agent["command"][1 : agent["command"].index("train.py")]
        options = dict(word.split("=", 1) for word in words if "=" in word) | ours
        options |= {"--local-addr": pods.address(name), "--standby": "0"}
        run = ["-m", "outlast.launch", "run", *(f"{k}={v}" for k, v in options.items())]
        run += [str(TRAIN), *cluster.training_options(), *STEPPING]
        agents[name] = cluster.start(name, run, {"OUTLAST_TOKEN": "a secret of this test"})
    cluster.until_step(10, size=4)
    leaves = cluster.host_of(1)
    # The image has the commands, and the kubelet sets the name of the host.
    env = {"HOSTNAME": leaves, "OUTLAST_TOKEN": "a secret of this test"}
    code = "import os, sys; os.environ['PATH'] = os.path.dirname(sys.executable) + ':' + os.environ"
    code += "['PATH']; os.execvp(sys.argv[1], sys.argv[1:])"
    command = agent["lifecycle"]["preStop"]["exec"]["command"]
    hook = cluster.start(leaves, ["-c", code, *command], env)
    assert cluster.wait(agents[leaves]) == [143], cluster.output()
    assert "this host has left the job" in agents[leaves].output
    assert hook.process.poll() is None, hook.output  # it would end with the container
    cluster.go()
    others = [agent for name, agent in agents.items() if name != leaves]
    assert cluster.wait(*others) == [0, 0, 0], cluster.output()
    assert all(
        f"weights {weights}" in agent.output for agent in others if "weights" in agent.output
    )
    cluster.check_views()
