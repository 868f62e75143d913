"""Hosts that stop for longer than their lease, and then continue."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from network import Network

from hosts.cluster import STEPPING, Cluster

pytestmark = pytest.mark.slow

SMALLER = ("--nnodes=2:3", "--replacement-timeout=1")


def _agent(cluster: Cluster, host: str, number: signal.Signals) -> None:
    agent = next(process for process in cluster.started if process.host == host)
    agent.process.send_signal(number)


def _whole_host(cluster: Cluster, host: str, number: signal.Signals) -> None:
    if number is signal.SIGSTOP:
        cluster.network[host].freeze()
    else:
        cluster.network[host].thaw()


@pytest.mark.parametrize(
    "leads",
    [
        pytest.param(False, id="follower", marks=pytest.mark.exhaustive),
        pytest.param(True, id="leader"),
    ],
)
@pytest.mark.parametrize("signal_to", [_agent, _whole_host])
def test_a_host_that_was_stopped_for_too_long_ends_its_workers_and_joins_as_a_new_host(
    network: Network,
    tmp_path: Path,
    weights: str,
    signal_to: Callable[[Cluster, str, signal.Signals], None],
    leads: bool,
) -> None:
    cluster = Cluster(network, tmp_path)
    agents = {name: cluster.agent(name, *SMALLER, args=STEPPING) for name in network.names}
    cluster.until_step(20, size=3)
    leader = cluster.leader()
    stopped = leader if leads else next(name for name in network.names if name != leader)
    workers = set(cluster.training(stopped))
    signal_to(cluster, stopped, signal.SIGSTOP)
    cluster.until_step(1, 1, size=2)
    if signal_to is _agent:
        assert not cluster.training(stopped)  # by the orphan killer, because the agent cannot
    signal_to(cluster, stopped, signal.SIGCONT)
    cluster.until(lambda: not workers & set(cluster.training(stopped)), "the end of its workers")
    cluster.until_said("takes no part in the job any longer", agents[stopped])
    cluster.until_step(1, 2, size=3)
    cluster.go()
    assert cluster.wait() == [0, 0, 0], cluster.output()
    cluster.check(weights, frozen=stopped)
