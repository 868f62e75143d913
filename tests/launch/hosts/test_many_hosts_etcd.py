"""`outlast run --rdzv-backend etcd` on several hosts: real agents, real workers, real etcd."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest

from etcd_cluster import Cluster, require_etcd
from launch.hosts.agents import Hosts
from launch.runs import WORKER, ends

pytestmark = pytest.mark.slow


def on(cluster: Cluster, tmp_path: Path, *options: str) -> Hosts:
    """Hosts that meet in `cluster`."""
    meet = (f"--rdzv-endpoint={cluster.rdzv_endpoint}", "--rdzv-backend=etcd", "--rdzv-id=job")
    return Hosts(tmp_path, WORKER, *meet, *options)


def test_two_hosts_share_one_budget(etcd: Cluster, tmp_path: Path) -> None:
    with on(etcd, tmp_path, "--nnodes=2", "--nproc-per-node=2", "--max-restarts=1") as hosts:
        one, two = hosts.start_all(2)
        workers = [one.ready(0), one.ready(1), two.ready(2), two.ready(3)]
        one.set_job("running")
        workers[1].kill()
        replacement = one.ready(1)
        assert "replacement 1 of 1" in one.err
        workers[2].kill()
        two.until_said("replacements are used")
        one.set_job("completed")
        for worker in (workers[0], replacement, workers[3]):
            worker.succeed()
        assert [one.wait(), two.wait()] == [0, 0]


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


def test_a_frozen_host_ends_its_workers_and_comes_back_as_a_spare(
    etcd: Cluster, tmp_path: Path
) -> None:
    with on(etcd, tmp_path, "--nnodes=2") as hosts:
        one, two = hosts.start_all(2)
        survivor, frozen = one.ready(0), two.ready(1)
        one.set_job("running")
        spare = hosts.start(4)
        spare.until_said("is a spare")
        two.process.send_signal(signal.SIGSTOP)
        replacement = spare.ready(1)
        assert ends(frozen.pid)  # although its agent is stopped
        two.process.send_signal(signal.SIGCONT)
        two.until_said("takes no part in the job any longer")
        two.until_said("is a spare")
        one.set_job("completed")
        survivor.succeed()
        replacement.succeed()
        assert [one.wait(), spare.wait(), two.wait()] == [0, 0, 0]


def test_a_host_with_other_arguments_is_refused(etcd: Cluster, tmp_path: Path) -> None:
    with on(etcd, tmp_path, "--nnodes=2") as hosts:
        (one,) = hosts.start_all(1)
        other = hosts.start(3, args=["--lr=2"])
        assert other.wait() == 1
        assert "command line of the script differs between the hosts of this run" in other.err
        assert "has '--lr=2'" in other.err
        one.until_said("command line of the script")
        one.process.send_signal(signal.SIGINT)
        assert one.wait() == 130
