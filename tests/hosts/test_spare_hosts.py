"""Six hosts for four places: two wait as spares, and take the places of two that are lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from network import Network

from hosts.cluster import Cluster

pytestmark = pytest.mark.slow


@pytest.fixture
def six(_allowed: None) -> Iterator[Network]:
    with Network([f"h{number}" for number in range(1, 7)]) as network:
        yield network


def test_spare_hosts_wait_and_take_the_places_of_two_that_are_lost_at_once(
    six: Network, tmp_path: Path, weights: str
) -> None:
    cluster = Cluster(six, tmp_path)
    agents = {name: cluster.agent(name, "--nnodes=4") for name in six.names}
    cluster.until_step(20, size=4)
    training = {step.host for step in cluster.steps()}
    spares = set(six.names) - training
    assert len(spares) == 2
    for name in spares:
        cluster.until_said("spare", agents[name])
    lost = [cluster.leader(), *training][:2]
    if lost[0] == lost[1] or lost[0] not in training:
        lost = sorted(training)[:2]
    for name in lost:
        six[name].power_off()
    cluster.until_step(1, 1, size=4)
    cluster.go()
    codes = {name: cluster.wait(agent)[0] for name, agent in agents.items()}
    killed = -signal.SIGKILL
    assert codes == {name: killed if name in lost else 0 for name in agents}, cluster.output()
    last = max(step.iteration for step in cluster.steps())
    cluster.until_stepped_by(last, set(six.names) - set(lost))
    cluster.check(weights)
