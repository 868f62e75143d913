"""A host joins a running job: its ranks take part after the last step, and none is made twice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from network import Network

from hosts.cluster import Cluster
from outlast.events.report import build, load
from outlast.events.types import CheckpointRestored

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "resized.py"
STATE = re.compile(r"(after|restored from (\w+) at) (\d+) (\w{16})")


@pytest.mark.parametrize(
    ("kind", "sources"),
    [
        ("ddp", {"live", "replica"}),
        pytest.param("fsdp2", {"memory"}, marks=pytest.mark.fsdp2),
        ("stream", {"live", "replica"}),
    ],
)
def test_a_host_that_joins_costs_no_step(
    network: Network, tmp_path: Path, kind: str, sources: set[str]
) -> None:
    """Rank 0 is between the optimizer's step and `job.step()`, and another rank may not be, when
    the new rank asks to join.
    """
    cluster = Cluster(network, tmp_path)

    def start(host: str) -> None:
        cluster.agent(host, "--nnodes=2:3", script=SCRIPT, args=(f"--kind={kind}",))

    for host in ("h1", "h2"):
        start(host)
    cluster.until_step(5, size=2)
    start("h3")
    assert cluster.wait() == [143, 143, 143], cluster.output()
    report, events = build(load(cluster.events)), load(cluster.events)
    assert [restart.redone_steps for restart in report.restarts] == [0], cluster.output()
    assert [restart.cause for restart in report.restarts] == [None]
    assert "1 move" in cluster.output()
    restored = [each for each in events if isinstance(each, CheckpointRestored)]
    assert {each.source for each in restored} == sources
    (last,) = {each.step for each in restored}
    assert last in (6, 7)
    assert f"the job grows after step {last}: rank 2 joins" in cluster.output()
    # What is restored are the weights and the moments after that step, bit by bit.
    states = STATE.findall(cluster.output())
    found = {state for _, source, step, state in states if step == str(last)}
    assert len(found) == 1, states
    assert any(source for _, source, step, _ in states if step == str(last))
    cluster.check_views()
