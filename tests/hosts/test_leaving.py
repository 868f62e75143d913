"""Hosts leave a job that goes on: their ranks move to other hosts at the end of a step, and no step
is made twice.
"""

from __future__ import annotations

import collections
import os
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from etcd import Etcd
from network import Network

from hosts.cluster import SHARDED, Cluster, Started

pytestmark = pytest.mark.slow
SLOW = ("--pause=0.2", "--hold-at=115")
"""The loop is at the end of a step again and again, up to `Cluster.go`."""


def check_no_step_twice(cluster: Cluster) -> None:
    made = collections.Counter((step.rank, step.step) for step in cluster.steps())
    assert not {each: n for each, n in made.items() if n > 1}


def tell(agent: Started, number: signal.Signals = signal.SIGTERM) -> None:
    agent.process.send_signal(number)


def drain(cluster: Cluster, at: str, *names: str, options: Sequence[str] = ()) -> Started:
    """Runs `outlast drain` on a host."""
    endpoints = ",".join(f"{name}:29400" for name in list(cluster.network.names)[:3])
    where = options or ["--rdzv-endpoint", endpoints]
    return cluster.start(at, ["-m", "outlast.launch", "drain", *names, "--rdzv-id", "test", *where])


@pytest.mark.parametrize("backend", ["c10d", "etcd"])
def test_a_signal_to_one_launcher_moves_its_ranks_to_a_spare_host(
    five: Network, tmp_path: Path, weights: str, backend: str
) -> None:
    options = ["--nnodes=3"]
    if backend == "etcd":
        if shutil.which("etcd") is None:
            pytest.skip("no etcd here (Debian: etcd-server)")
        etcd = Etcd(five, ["h5"], tmp_path / "etcd")
        etcd.start_all()
        options += ["--rdzv-backend=etcd", "--rdzv-endpoint", etcd.endpoints]
        options += ["--rdzv-conf=last_call_timeout=5"]
    cluster = Cluster(five, tmp_path)
    agents = {name: cluster.agent(name, *options, args=SLOW) for name in five.names[:4]}
    cluster.until_step(20, size=3)
    leaves = cluster.host_of(1)
    if backend == "etcd":
        asked = drain(cluster, "h5", leaves, options=options[1:])
        assert cluster.wait(asked) == [0], cluster.output()
    else:
        tell(agents[leaves])
    assert cluster.wait(agents[leaves]) == [0], cluster.output()
    assert "this host has left the job" in agents[leaves].output
    cluster.go()
    assert cluster.wait(*agents.values()) == [0, 0, 0, 0], cluster.output()
    if backend == "etcd":
        five["h5"].power_off()
    cluster.check(weights)
    check_no_step_twice(cluster)
    assert "1 move" in cluster.output()
    report = cluster.start("h1", ["-m", "outlast.launch", "report", str(cluster.events)])
    assert cluster.wait(report) == [0]
    assert re.search(r"moved: (SIGTERM|outlast drain)", report.output), report.output
    said = " ".join(report.output.split())
    assert re.search(r"their successors received [^;]*B of their state", said), report.output


def test_shards_and_all_that_one_rank_has_move_with_the_host_of_rank_0(
    four: Network, tmp_path: Path, sharded_weights: str
) -> None:
    cluster = Cluster(four, tmp_path)
    agents = {
        name: cluster.agent(name, "--nnodes=3", script=SHARDED, args=SLOW) for name in four.names
    }
    cluster.until_step(10, size=3)
    leaves = cluster.host_of(0)
    tell(agents[leaves])
    assert cluster.wait(agents[leaves]) == [0], cluster.output()
    cluster.go()
    assert cluster.wait(*agents.values()) == [0, 0, 0, 0], cluster.output()
    cluster.check(sharded_weights)
    check_no_step_twice(cluster)
    assert "loaded" not in cluster.output()


@pytest.mark.parametrize("backend", ["c10d", pytest.param("etcd", marks=pytest.mark.exhaustive)])
def test_one_rank_moves_to_another_process_of_its_host(
    four: Network, tmp_path: Path, sharded_weights: str, backend: str
) -> None:
    options, where = ["--nnodes=3"], list[str]()
    if backend == "etcd":
        if shutil.which("etcd") is None:
            pytest.skip("no etcd here (Debian: etcd-server)")
        etcd = Etcd(four, ["h4"], tmp_path / "etcd")
        etcd.start_all()
        where = ["--rdzv-backend=etcd", "--rdzv-endpoint", etcd.endpoints]
        options += [*where, "--rdzv-conf=last_call_timeout=5"]
    cluster = Cluster(four, tmp_path)
    agents = [cluster.agent(n, *options, script=SHARDED, args=SLOW) for n in list(four.names)[:3]]
    cluster.until_step(10, size=3)
    before = next(step for step in cluster.steps() if step.rank == 0)
    asked = drain(cluster, "h4", "--rank=0", options=where)
    assert cluster.wait(asked) == [0], asked.output
    assert f"rank 0 of host {before.host}" in asked.output
    cluster.until_said(f"rank 0 has moved from pid {before.pid}")
    wrong = drain(cluster, "h4", "--rank=3", options=where)
    assert cluster.wait(wrong) == [1]
    assert "no host runs rank 3; those that run: rank 0, rank 1, rank 2" in wrong.output
    cluster.go()
    assert cluster.wait(*agents) == [0, 0, 0], cluster.output()
    assert cluster.host_of(0) == before.host
    if backend == "etcd":
        four["h4"].power_off()
    cluster.check(sharded_weights)
    check_no_step_twice(cluster)
    assert "1 move" in cluster.output()


def test_a_drained_job_goes_on_smaller_and_grows_again_when_the_host_is_back(
    network: Network, tmp_path: Path, weights: str
) -> None:
    cluster = Cluster(network, tmp_path)
    agents = {name: cluster.agent(name, "--nnodes=2:3", args=SLOW) for name in network.names}
    cluster.until_step(10, size=3)
    leaves = cluster.leader()
    other = next(name for name in network.names if name != leaves)
    asked = drain(cluster, other, leaves)
    assert cluster.wait(asked, agents[leaves]) == [0, 0], cluster.output()
    assert "is to leave run 'test'" in asked.output
    two = cluster.until_step(1, 1, size=2)
    again = cluster.agent(leaves, "--nnodes=2:3", args=SLOW)
    cluster.until_step(two.step, two.iteration + 1, size=3)
    cluster.go()
    assert cluster.wait(*agents.values(), again) == [0, 0, 0, 0], cluster.output()
    cluster.check(weights)
    wrong = drain(cluster, other, "h9")
    assert cluster.wait(wrong) == [1]
    report = cluster.start(other, ["-m", "outlast.launch", "report", str(cluster.events)])
    assert cluster.wait(report) == [0]
    assert "moved: new ranks joined" in report.output


def test_hosts_that_are_told_at_once_stop_the_job(network: Network, tmp_path: Path) -> None:
    cluster = Cluster(network, tmp_path)
    agents = [cluster.agent(name, "--nnodes=1:3", args=SLOW) for name in network.names]
    cluster.until_step(10, size=3)
    for agent in agents:
        tell(agent)
    assert cluster.wait(*agents) == [143, 143, 143], cluster.output()
    assert "job stopped by SIGTERM: saved" in cluster.output()
    cluster.check_views()


@pytest.mark.exhaustive
def test_two_hosts_leave_at_once_one_by_a_file_and_one_by_the_program(
    five: Network, tmp_path: Path, sharded_weights: str
) -> None:
    cluster = Cluster(five, tmp_path)
    notice = tmp_path / "notice"
    env = {"LEAVE_AT": "h2:15"}
    options = {name: ["--nnodes=3"] for name in five.names}
    options["h1"].append(f"--leave-when={notice}")
    # These two come first, so that they are no spares.
    agents = {
        n: cluster.agent(n, *options[n], script=SHARDED, args=SLOW, env=env) for n in ("h1", "h2")
    }
    cluster.until_said("joined: .*hosts in the job: 2", *agents.values())
    agents |= {
        n: cluster.agent(n, *options[n], script=SHARDED, args=SLOW) for n in ("h3", "h4", "h5")
    }
    cluster.until_step(10, size=3)
    notice.touch()
    assert cluster.wait(agents["h1"], agents["h2"]) == [0, 0], cluster.output()
    assert "the program said so" in agents["h2"].output
    assert "--leave-when" in agents["h1"].output
    cluster.go()
    assert cluster.wait(*agents.values()) == [0] * 5, cluster.output()
    cluster.check(sharded_weights)
    check_no_step_twice(cluster)


def test_a_rank_that_dies_while_it_hands_over_is_an_ordinary_fault(
    four: Network, tmp_path: Path, sharded_weights: str
) -> None:
    cluster = Cluster(four, tmp_path)
    env = {"DIE_IN_HANDOVER": "1"}
    agents = {
        n: cluster.agent(n, "--nnodes=3", script=SHARDED, args=SLOW, env=env) for n in four.names
    }
    cluster.until_step(30, size=3)
    leaves = cluster.host_of(1)
    drain(cluster, leaves, leaves)
    cluster.until_step(26, 1, size=3)  # from the checkpoint of step 25, or a later one
    cluster.go()
    others = [agent for name, agent in agents.items() if name != leaves]
    assert cluster.wait(*others) == [0, 0, 0], cluster.output()
    assert "cannot be fetched" in cluster.output()
    cluster.wait(agents[leaves])
    cluster.check(sharded_weights)


@pytest.mark.exhaustive
def test_a_rank_that_dies_while_its_successor_imports_is_replaced_on_its_host(
    four: Network, tmp_path: Path, sharded_weights: str
) -> None:
    cluster = Cluster(four, tmp_path)
    mark = tmp_path / "imports"
    agents = {
        n: cluster.agent(n, "--nnodes=3", script=SHARDED, args=SLOW) for n in list(four.names)[:3]
    }
    cluster.until_step(30, size=3)
    env = {"IMPORT_WHILE": str(mark)}
    mark.touch()
    takes = cluster.agent("h4", "--nnodes=3", script=SHARDED, args=SLOW, env=env)
    cluster.until_said("joined: .*h4", agents["h1"])
    leaves = cluster.host_of(1)
    drain(cluster, "h1", leaves)
    cluster.until_said("moves? to host h4", agents[leaves])
    (worker,) = cluster.training(leaves)
    os.kill(worker, signal.SIGKILL)
    cluster.until_step(1, 1, size=3)  # its successor still imports
    assert cluster.host_of(1) == leaves
    assert "replacement 1 of 10" in agents[leaves].output
    mark.unlink()
    assert cluster.wait(agents[leaves]) == [0], cluster.output()
    cluster.go()
    assert cluster.wait(takes, *agents.values()) == [0] * 4, cluster.output()
    cluster.check(sharded_weights)


@pytest.mark.exhaustive
def test_ranks_stay_if_their_successors_fail_and_all_hosts_say_why(
    network: Network, tmp_path: Path
) -> None:
    cluster = Cluster(network, tmp_path)
    agents = {n: cluster.agent(n, "--nnodes=2", script=SHARDED, args=SLOW) for n in ("h1", "h2")}
    cluster.until_step(5, size=2)
    env = {"FAIL_IMPORT": "no such wheel here"}
    spare = cluster.agent("h3", "--nnodes=2", script=SHARDED, args=SLOW, env=env)
    cluster.until_said("joined: .*h3", agents["h1"])
    leaves, rank = cluster.host_of(1), 1
    drain(cluster, "h1", leaves)
    said = rf"the successor of rank {rank} \(pid \d+\) exited with code 1: ImportError: no such"
    for agent in agents.values():
        cluster.until_said(f"gets no more ranks: {said}", agent)
    cluster.until_said(f"the ranks of host {leaves} stay", *agents.values())
    cluster.go()
    assert cluster.wait(spare, *agents.values()) == [69, 0, 0], cluster.output()
    assert len(re.findall(said, spare.output)) >= 3
    check_no_step_twice(cluster)


@pytest.mark.exhaustive
def test_a_host_that_goes_away_does_not_wait_for_a_successor_that_comes_late(
    four: Network, tmp_path: Path, sharded_weights: str
) -> None:
    cluster = Cluster(four, tmp_path)
    env = {"SUCCEED_AFTER": "40"}
    options = ("--nnodes=3", "--grace=20")
    agents = {
        name: cluster.agent(name, *options, script=SHARDED, args=SLOW, env=env)
        for name in four.names
    }
    cluster.until_step(10, size=3)
    leaves = cluster.host_of(1)
    tell(agents[leaves])
    # All save the step after half of the grace time, and the others wait for the successor.
    assert cluster.wait(agents[leaves]) == [0], cluster.output()
    cluster.until_said("its ranks save, and leave", agents[leaves])
    cluster.until_step(1, 1, size=3)
    cluster.go()
    assert cluster.wait(*agents.values()) == [0] * 4, cluster.output()
    cluster.check(sharded_weights)
    check_no_step_twice(cluster)


@pytest.mark.exhaustive
@pytest.mark.parametrize("another", [True, False])
def test_ranks_stay_where_they_are_if_the_host_is_lost_that_was_to_take_them(
    five: Network, tmp_path: Path, sharded_weights: str, another: bool
) -> None:
    cluster = Cluster(five, tmp_path)
    mark, options = tmp_path / "imports", ("--nnodes=3", "--replacement-timeout=4")
    agents = {n: cluster.agent(n, *options, script=SHARDED, args=SLOW) for n in five.names[:3]}
    cluster.until_step(5, size=3)
    env = {"IMPORT_FOREVER": str(mark)}
    takes = cluster.agent("h4", *options, script=SHARDED, args=SLOW, env=env)
    cluster.until_said("joined: .*h4", agents["h1"])
    leaves = cluster.host_of(1)
    drain(cluster, "h1", leaves)
    cluster.until(mark.exists, "the start of the successor")
    five["h4"].power_off()
    cluster.until_said(f"the ranks of host {leaves} stay", *agents.values())
    if another:
        agents["h5"] = cluster.agent("h5", *options, script=SHARDED, args=SLOW)
        assert cluster.wait(agents[leaves]) == [0], cluster.output()
    else:
        cluster.until_said(f"host {leaves} does not leave: no other host has joined", agents["h1"])
    cluster.go()
    assert cluster.wait(*agents.values()) == [0] * len(agents), cluster.output()
    cluster.wait(takes)
    cluster.check(sharded_weights)
    check_no_step_twice(cluster)
