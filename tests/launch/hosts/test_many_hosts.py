"""`outlast run` on several hosts: real agents, real workers, and for some tests real etcd."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from etcd_cluster import Cluster, require_etcd
from launch.hosts.agents import Hosts, address, on
from launch.runs import WORKER, Run, ends

SHM = "/dev/shm"


def codes(*runs: Run) -> list[int]:
    return [run.wait() for run in runs]


def test_each_host_has_its_ranks(tmp_path: Path) -> None:
    with Hosts(tmp_path, WORKER, "--nnodes=2", "--nproc-per-node=2") as hosts:
        runs = hosts.start_all(2)
        workers = [runs[rank // 2].ready(rank) for rank in range(4)]
        for worker in workers:
            own = address(2 + worker.rank // 2)
            assert worker.env["OUTLAST_HOST_ADDR"] == own
            first = workers[worker.rank // 2 * 2].env
            assert worker.env["OUTLAST_STORE"] == f"127.0.0.1:{first['MASTER_PORT']}"
            assert worker.env["MASTER_ADDR"] == "127.0.0.1"
            assert worker.env["OUTLAST_MASTER_ADDR"] == address(2)
            worker.succeed()
        assert codes(*runs) == [0, 0]
        for run in runs:
            assert run.verdict == "job completed"


FAILS = """
import os
from outlast import inprocess

@inprocess.Wrapper()
def train(call):
    if call.iteration < 2 and os.environ["RANK"] == "1":
        raise OSError("a planned fault")

train()
"""


@pytest.mark.slow
def test_every_host_tells_the_restarts_by_cause(tmp_path: Path) -> None:
    with Hosts(tmp_path, FAILS, "--nnodes=2") as hosts:
        runs = hosts.start_all(2)
        assert codes(*runs) == [0, 0]
        for run in runs:
            told = r"job completed after .* and 2 restarts: 2 x OSError at script\.py:8 \(rank 1\)"
            assert re.search(told, run.words[-1]), run.err


@pytest.mark.slow
def test_a_failure_restarts_all_workers_and_then_ends_the_job(tmp_path: Path) -> None:
    with Hosts(tmp_path, WORKER, "--nnodes=2", "--max-restarts=1") as hosts:
        one, two = hosts.start_all(2)
        one.ready(0)
        two.ready(1).fail()
        one.until_said("exited with code 3: restart 1 of 1, of all workers")
        one.ready(0)
        again = two.ready(1)
        assert again.env["TORCHELASTIC_RESTART_COUNT"] == "1"
        again.fail()
        assert codes(one, two) == [3, 3]
        for run in (one, two):
            assert f"first cause: rank 1 (pid {again.pid}, host " in run.err


@pytest.mark.slow
def test_a_signal_to_one_agent_stops_the_job(tmp_path: Path) -> None:
    with Hosts(tmp_path, WORKER, "--nnodes=2") as hosts:
        one, two = hosts.start_all(2)
        one.ready(0)
        two.ready(1)
        two.process.send_signal(signal.SIGTERM)
        assert codes(one, two) == [143, 143]
        assert one.verdict == two.verdict == "job ended by SIGTERM, exit code 143,"
        assert "SIGTERM to host " in one.err


@pytest.mark.skipif(not Path(SHM).is_dir(), reason="the lease page is elsewhere")
def test_a_signal_ends_an_agent_that_has_found_no_other(tmp_path: Path) -> None:
    with Hosts(tmp_path, WORKER, "--nnodes=2") as hosts:
        run = hosts.start(3)  # not the endpoint
        run.until_said("looking for the hosts of run")
        while not (pages := lease_pages(run)):
            assert run.process.poll() is None, run.err
            time.sleep(0.01)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143
        assert "SIGTERM: this host ends before it has joined the job" in run.err
        assert not any(page.exists() for page in pages)


def lease_pages(run: Run) -> list[Path]:
    """The lease pages that this agent has mapped."""
    lines = Path(f"/proc/{run.process.pid}/maps").read_text().splitlines()
    return [Path(line.split()[-1]) for line in lines if f" {SHM}/outlast-" in line]


@pytest.mark.slow
def test_the_hosts_share_one_budget_of_replacements(meet: Callable[..., Hosts]) -> None:
    with meet("--nnodes=2", "--nproc-per-node=2", "--max-restarts=1") as hosts:
        one, two = hosts.start_all(2)
        workers = [one.ready(0), one.ready(1), two.ready(2), two.ready(3)]
        one.set_job("running")
        workers[1].kill()
        replacement = one.ready(1)
        assert "replacement 1 of 1" in one.err
        assert replacement.env["OUTLAST_REPLACEMENT"] == "1"
        workers[2].kill()
        two.until_said("replacements are used")
        one.set_job("completed")
        for worker in (workers[0], replacement, workers[3]):
            worker.succeed()
        assert codes(one, two) == [0, 0]


@pytest.mark.slow
def test_the_host_of_the_store_dies_and_a_spare_takes_its_place(tmp_path: Path) -> None:
    with Hosts(tmp_path, WORKER, "--nnodes=2", endpoints=3) as hosts:
        runs = [hosts.start(number) for number in (2, 3, 4)]
        leader, other, spare = sorted(runs, key=place)
        leader.ready(0)
        survivor = other.ready(1)
        other.set_job("running")
        leader.process.kill()
        spare.until_said("takes place 0: rank 0")
        replacement = spare.ready(0)
        assert replacement.env["OUTLAST_REPLACEMENT"] == "1"
        # Under load, the first election may have no winner: the term may be a later one.
        assert re.search(r"leads the hosts \(term [2-9]", spare.err)
        other.set_job("completed")
        survivor.succeed()
        replacement.succeed()
        assert codes(other, spare) == [0, 0]


@pytest.mark.slow
def test_the_leader_says_for_what_the_job_waits(tmp_path: Path) -> None:
    with Hosts(tmp_path, WORKER, "--nnodes=1:2", "--replacement-timeout=300") as hosts:
        one = hosts.start(2)
        one.ready(0)
        one.set_job("running")
        two = hosts.start(3)
        two.ready(1)
        two.process.kill()
        one.until_said("waiting for a host for rank 1; in ")
        three = hosts.start(4)
        replacement = three.ready(1)
        one.process.send_signal(signal.SIGTERM)
        assert codes(one, three) == [143, 143]
        assert replacement.env["OUTLAST_REPLACEMENT"] != "0"


@pytest.mark.slow
def test_a_plain_job_restarts_with_the_hosts_that_are_left(tmp_path: Path) -> None:
    with Hosts(tmp_path, WORKER, "--nnodes=1:2", "--max-restarts=1") as hosts:
        one = hosts.start(2)
        one.ready(0)  # alone, as the last call is over at once
        two = hosts.start(3)
        one.until_said(f"({address(3)}) has joined")
        assert one.ready(0).env["RANK"] == "0"
        two.ready(1)
        two.process.kill()
        one.until_said("was lost")
        last = one.ready(0)
        assert last.env["TORCHELASTIC_RESTART_COUNT"] == "2"
        last.succeed()
        assert one.wait() == 0
        assert "restart 1 of 1" in one.err


@pytest.mark.slow
def test_too_few_hosts(tmp_path: Path) -> None:
    with Hosts(tmp_path, WORKER, "--nnodes=3", "--rdzv-conf=join_timeout=8") as hosts:
        one, two = hosts.start_all(2)
        assert codes(one, two) == [1, 1]
        for run in (one, two):
            assert "job failed, exit code 1," in run.err
            assert "first cause: waited 8.00 s for 3 hosts (--nnodes): only 2 joined:" in run.err
            assert f"({address(2)})" in run.err
            assert f"({address(3)})" in run.err


@pytest.mark.slow
def test_a_host_with_other_endpoints_is_refused(tmp_path: Path) -> None:
    # The one listed first may found a group alone: each of these would.
    with Hosts(tmp_path, WORKER, "--nnodes=2", endpoints=2) as hosts:
        (one,) = hosts.start_all(1)
        given = next(o for o in hosts.options if o.startswith("--rdzv-endpoint="))
        swapped = ",".join(reversed(given.partition("=")[2].split(",")))
        other = hosts.start(3, f"--rdzv-endpoint={swapped}")
        assert other.wait() == 1
        assert "--rdzv-endpoint differs between the hosts of this run" in other.err
        one.process.send_signal(signal.SIGINT)
        assert one.wait() == 130


@pytest.mark.slow
def test_a_host_with_other_arguments_is_refused(meet: Callable[..., Hosts]) -> None:
    with meet("--nnodes=2") as hosts:
        (one,) = hosts.start_all(1)
        other = hosts.start(3, args=["--lr=2"])
        assert other.wait() == 1
        assert "command line of the script differs between the hosts of this run" in other.err
        assert "has '--lr=2'" in other.err
        one.until_said("command line of the script")
        one.process.send_signal(signal.SIGINT)
        assert one.wait() == 130


@pytest.mark.slow
def test_a_host_that_was_frozen_ends_its_workers_and_comes_back_as_a_spare(
    meet: Callable[..., Hosts],
) -> None:
    with meet("--nnodes=2") as hosts:
        one, two = hosts.start_all(2)
        survivor = one.ready(0)
        frozen = two.ready(1)
        one.set_job("running")
        spare = hosts.start(4, "--standby=1")
        spare.until_said("is a spare")
        spare.until_said("is ready")
        two.process.send_signal(signal.SIGSTOP)
        replacement = spare.ready(1)
        assert replacement.env["OUTLAST_REPLACEMENT"] == "1"
        assert f"standby pid {replacement.pid} is ready" in spare.err
        assert ends(frozen.pid)  # although its agent is stopped
        two.process.send_signal(signal.SIGCONT)
        two.until_said("takes no part in the job any longer")
        two.until_said("is a spare")
        one.set_job("completed")
        survivor.succeed()
        replacement.succeed()
        assert codes(one, spare, two) == [0, 0, 0]
        assert [run.verdict for run in (one, spare, two)] == ["job completed"] * 3
        own_time = ["; this host took part for " in run.words[-1] for run in (one, spare, two)]
        assert own_time == [False, True, True]


@pytest.mark.slow
def test_hosts_die_while_members_of_etcd_do(tmp_path: Path) -> None:
    require_etcd()
    with (
        Cluster(3) as cluster,
        contextlib.closing(cluster.client()),
        on(cluster, tmp_path, "--nnodes=2", "--host-timeout=4") as hosts,
    ):
        first, other = hosts.start_all(2)
        first.ready(0)
        survivor = other.ready(1)
        other.set_job("running")
        spare = hosts.start(4)
        spare.until_said("is a spare")
        cluster.leader().end()
        first.process.kill()
        replacement = spare.ready(0)
        assert replacement.env["OUTLAST_REPLACEMENT"] == "1"
        other.set_job("completed")
        survivor.succeed()
        replacement.succeed()
        assert [other.wait(), spare.wait()] == [0, 0]


def place(run: Run) -> int:
    """The place of a host, once it has one; spares come last."""
    run.until(lambda: "started 1 rank" in run.err or "is a spare" in run.err, "a place")
    return 0 if "rank 0 is pid" in run.err else 1 if "rank 1 is pid" in run.err else 2


@pytest.mark.slow
def test_a_host_whose_health_command_fails_while_the_job_runs_leaves(tmp_path: Path) -> None:
    command = "test ! -e sick || { echo xid 79; exit 3; }"
    watched = ("--health-interval=1", "--health-command", command)
    with Hosts(tmp_path, WORKER, "--nnodes=1:2", "--rdzv-conf=last_call_timeout=20") as hosts:
        one, two = hosts.start(2), hosts.start(3, *watched)
        one.ready(0)
        two.ready(1)
        (tmp_path / "sick").touch()
        one.until_said("all workers restart without it")
        assert f"{command}: exit code 3, and its last output: xid 79" in one.err
        one.ready(0).succeed()
        assert codes(one, two) == [0, 0]
