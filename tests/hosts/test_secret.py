"""Jobs with a secret, and what a program on another host can reach."""

from __future__ import annotations

from pathlib import Path

import pytest
from network import Network

from hosts.cluster import Cluster

# Five launchers and three workers, which import torch.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TOKEN, OTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4
GLOO = Path(__file__).parents[1] / "launch" / "hosts" / "scripts" / "gloo_env.py"
NO_SECRET = "this job has no secret: everyone who can reach the ports"
CLIENT = """
import sys
from outlast.coordination.stores.tcp_client import TcpClient
print("read", TcpClient(sys.argv[1], int(sys.argv[2]), 60.0).read("any"))
"""


def variables(pid: int) -> dict[str, str]:
    """The environment with which a process was started."""
    lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(line.split("=", 1) for line in lines if line)


def test_a_job_with_a_secret_takes_only_hosts_that_know_it(
    four: Network, tmp_path: Path, weights: str
) -> None:
    cluster = Cluster(four, tmp_path, forks=False)  # the command lines are read
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    agents = [
        cluster.agent("h1", "--nnodes=3", env={"OUTLAST_TOKEN": TOKEN}),
        cluster.agent("h2", "--nnodes=3", env={"OUTLAST_TOKEN": TOKEN}),
        cluster.agent("h3", "--nnodes=3", "--token-file", str(file)),
    ]
    cluster.until_step(10, size=3)
    wrong = cluster.agent("h4", "--nnodes=3", env={"OUTLAST_TOKEN": OTHER})
    none = cluster.agent("h4", "--nnodes=3")
    assert cluster.wait(wrong, none) == [1, 1]
    assert "h1:29400: its secret (OUTLAST_TOKEN or --token-file) differs" in wrong.output
    assert "h1:29400: it uses a secret, and this host has none" in none.output
    address = four.address("h4")
    cluster.until_said(f"refused a connection from {address}: its secret", agents[0])
    cluster.until_said(f"refused a connection from {address}: it uses no secret", agents[0])

    # The workers' server answers on its host, and not to other hosts.
    (worker,) = cluster.training("h1")
    given = variables(worker)
    near = cluster.start("h1", ["-c", CLIENT, "127.0.0.1", given["MASTER_PORT"]])
    far = cluster.start("h4", ["-c", CLIENT, four.address("h1"), given["MASTER_PORT"]])
    assert cluster.wait(near, far) == [0, 1], near.output + far.output
    assert "read None" in near.output
    assert "refused" in far.output

    # Workers have a key for their copies, the same on all hosts, and not the secret.
    keys = set()
    for host in ("h1", "h2", "h3"):
        keys |= {variables(pid)["OUTLAST_COPIES_KEY"] for pid in cluster.training(host)}
        for pid in four[host].pids():
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            assert TOKEN.encode() not in command
            launcher = b"outlast.launch\0run" in command
            assert launcher or "OUTLAST_TOKEN" not in variables(pid), command
    (key,) = keys
    cluster.go()
    assert cluster.wait(*agents) == [0, 0, 0], cluster.output()
    cluster.check_views()
    said = [m for p in agents if f"weights {weights}" in (m := p.output)]
    assert len(said) == 1, cluster.output()  # rank 0 prints them
    written = [each for each in tmp_path.rglob("*") if each.is_file() and each != file]
    for each in written:
        content = each.read_bytes()
        assert TOKEN.encode() not in content, each
        assert key.encode() not in content, each
    assert any(each.suffix == ".jsonl" for each in written)
    assert NO_SECRET not in cluster.output()


def test_a_plain_script_needs_no_store_of_another_host(four: Network, tmp_path: Path) -> None:
    cluster = Cluster(four, tmp_path)
    agents = [cluster.agent(host, "--nnodes=2", script=GLOO) for host in ("h1", "h2")]
    assert cluster.wait(*agents) == [0, 0], cluster.output()
    for agent in agents:
        assert '{"total": 1.0, "objects": 2}' in agent.output
        assert agent.output.count(NO_SECRET) == 1
        assert "OUTLAST_TOKEN" in agent.output
        assert "openssl rand -hex 32" in agent.output
