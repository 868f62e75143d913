"""A job of three hosts goes to two and back, again and again: no step is made twice, no sample is
lost or seen twice, and where the bits do not depend on the number of ranks, they are the same.
"""

from __future__ import annotations

import collections
import json
import os
import re
import sys
from pathlib import Path

import pytest
from network import Network

from hosts.cluster import Cluster
from hosts.test_leaving import check_no_step_twice, drain
from zygote import Zygote

SCRIPT = Path(__file__).parent / "scripts" / "to_and_fro.py"
LENGTH, STEPS_AN_EPOCH = 960, 40
ROUNDS = int(os.environ.get("ROUNDS", "50"))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_from_three_hosts_to_two_and_back_again_and_again(
    network: Network, tmp_path: Path, zygote: Zygote, kind: str
) -> None:
    cluster = Cluster(network, tmp_path)
    env, options = {"KIND": kind}, ("--nnodes=2:3",)
    agents = {n: cluster.agent(n, *options, script=SCRIPT, env=env) for n in network.names}
    at = cluster.until_step(5, size=3)
    for number in range(ROUNDS):
        # Now and then the host of rank 0, and the one that leads.
        leaves, other = (network.names[(number + k) % 3] for k in (0, 1))
        asked = drain(cluster, other, leaves)
        assert cluster.wait(asked, agents[leaves]) == [0, 0], cluster.output()
        at = cluster.until_step(at.step, at.iteration + 1, size=2)
        agents[leaves] = cluster.agent(leaves, *options, script=SCRIPT, env=env)
        at = cluster.until_step(at.step, at.iteration + 1, size=3)
    last = cluster.steps()[-1].step + 30
    _write(tmp_path / "go", last)
    assert cluster.wait(*agents.values()) == [0, 0, 0], cluster.output()
    check_no_step_twice(cluster)
    cluster.check_views()
    cluster.check_nothing_left()
    _check_samples(tmp_path / "samples", last)
    if kind == "ddp":
        assert _weights(cluster.output()) == _undisturbed(zygote, tmp_path / "alone", last)


def _write(go: Path, last: int) -> None:
    new = go.with_suffix(".new")
    new.write_text(str(last))
    new.rename(go)


def _check_samples(folder: Path, last: int) -> None:
    steps: collections.defaultdict[int, list[int]] = collections.defaultdict(list)
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            found = json.loads(line)
            steps[found["step"]] += found["samples"]
    assert sorted(steps) == list(range(1, last + 1))
    for first in range(1, last + 1, STEPS_AN_EPOCH):
        epoch = range(first, min(first + STEPS_AN_EPOCH, last + 1))
        seen = [sample for step in epoch for sample in steps[step]]
        assert len(set(seen)) == len(seen) == len(epoch) * LENGTH // STEPS_AN_EPOCH, first


def _weights(output: str) -> str:
    found = re.search(r"weights (\w+)", output)
    assert found is not None
    return found[1]


def _undisturbed(zygote: Zygote, folder: Path, last: int) -> str:
    (folder / "trace").mkdir(parents=True)
    _write(folder / "go", last)
    where = ["--state", folder / "state", "--trace", folder / "trace", "--go", folder / "go"]
    command = [sys.executable, str(SCRIPT), *map(str, where)]
    done = zygote.run(command, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return _weights(done.stdout)
