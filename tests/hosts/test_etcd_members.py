"""The store on three etcd members, one a host: the host of etcd's leader is lost meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import DEVNULL

import pytest
from etcd import Etcd
from network import Network

from hosts.cluster import LEASE_S, Cluster, Started

WRITER = Path(__file__).parent / "scripts" / "etcd_writer.py"
WAITER = WRITER.with_name("etcd_waiter.py")
COUNT = 300

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd here (Debian: etcd-server)"),
]

Fault = Callable[[Network, str], None]


def _power_off(network: Network, leader: str) -> None:
    network[leader].power_off()


def _is_not_heard(network: Network, leader: str) -> None:
    for host in network:
        network.cut(leader, host.name)


def _hears_nothing(network: Network, leader: str) -> None:
    for host in network:
        network.cut(host.name, leader)


def _freeze(network: Network, leader: str) -> None:
    network[leader].freeze()


@pytest.mark.parametrize(
    "fault",
    [
        _power_off,
        pytest.param(_is_not_heard, marks=pytest.mark.exhaustive),
        pytest.param(_hears_nothing, marks=pytest.mark.exhaustive),
        _freeze,
    ],
)
def test_every_write_counts_once_although_the_host_of_the_leader_is_lost(
    network: Network, tmp_path: Path, fault: Fault
) -> None:
    etcd = Etcd(network, ["h1", "h2", "h3"], tmp_path / "etcd")
    etcd.start_all()
    leader = etcd.leader()
    others = [name for name in etcd.names if name != leader]
    cluster = Cluster(network, tmp_path)
    # The endpoints begin with the leader's: each writer is connected to it.
    endpoints = ",".join(f"{name}:2379" for name in [leader, *others])
    writers = [cluster.start(name, [str(WRITER), endpoints, str(COUNT)]) for name in others]
    for writer in writers:
        cluster.until_said("wrote 20\n", writer)
    fault(network, leader)
    _check_writes(cluster, others, writers)


def _check_writes(cluster: Cluster, others: list[str], writers: list[Started]) -> None:
    assert cluster.wait(*writers) == [0, 0], cluster.output()
    results = [cluster.until_said(r"winner (\w+) sums \[(.*)\] log (.*)", w) for w in writers]
    assert results[0][1] == results[1][1]
    assert results[0][1] in others
    sums = [int(number) for result in results for number in result[2].split(", ")]
    assert sorted(sums) == list(range(1, 2 * COUNT + 1))
    assert results[0][3] == results[1][3]
    entries = results[0][3].split(";")[:-1]
    for name in others:
        written = [entry for entry in entries if entry.startswith(name)]
        assert written == [f"{name}:{number}" for number in range(COUNT)]


def test_a_wait_ends_although_its_member_lost_power_and_was_back_at_once(
    network: Network, tmp_path: Path
) -> None:
    # The connection of the watch is unknown to the member that came back, which answers others.
    etcd = Etcd(network, ["h1", "h2", "h3"], tmp_path / "etcd")
    etcd.start_all()
    cluster = Cluster(network, tmp_path)
    waiter = cluster.start("h2", [str(WAITER), etcd.endpoints, "wait"])
    cluster.until_said("waiting", waiter)
    network["h1"].power_off()
    network.boot("h1")
    etcd.start("h1")
    etcd.leader()
    assert cluster.wait(cluster.start("h3", [str(WAITER), "h3:2379,h2:2379", "put"])) == [0]
    assert cluster.wait(waiter) == [0]


@pytest.fixture
def disks(network: Network, tmp_path: Path) -> Iterator[Callable[[str, bool], None]]:
    """Each member's data on a file system of its host; `disks(host, stalls)` freezes it."""

    def on(host: str, *command: str) -> int:
        return network[host].start(command, stdout=DEVNULL, stderr=DEVNULL).wait()

    def stall(host: str, stalls: bool) -> None:
        assert on(host, "fsfreeze", "--freeze" if stalls else "--unfreeze", str(folder / host)) == 0

    folder = tmp_path / "etcd"
    for host in network.names:
        image, place = tmp_path / f"{host}.ext4", folder / host
        place.mkdir(parents=True)
        with image.open("wb") as file:
            file.truncate(300 << 20)
        made = on(host, "mkfs.ext4", "-q", str(image)), on(host, "mount", image, str(place))
        if any(made):
            pytest.skip("no file system can be mounted here, whose disk could stall")
    yield stall
    for host in network.names:  # else nothing that is on it ends
        on(host, "fsfreeze", "--unfreeze", str(folder / host))


@pytest.mark.parametrize("which", ["follower", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_every_write_counts_once_although_disks_stall(
    network: Network, tmp_path: Path, disks: Callable[[str, bool], None], which: str
) -> None:
    etcd = Etcd(network, ["h1", "h2", "h3"], tmp_path / "etcd")
    etcd.start_all()
    leader = etcd.leader()
    others = [name for name in etcd.names if name != leader]
    stalled = others[:1] if which == "follower" else list(etcd.names)
    cluster = Cluster(network, tmp_path)
    # The endpoints begin with the stalled follower's: each writer is connected to it.
    endpoints = ",".join(f"{name}:2379" for name in [*others, leader])
    writers = [cluster.start(name, [str(WRITER), endpoints, str(COUNT)]) for name in others]
    for writer in writers:
        cluster.until_said("wrote 20\n", writer)
    for host in stalled:
        disks(host, True)
    if which == "all":
        time.sleep(LEASE_S)  # no write can be durable meanwhile
        for host in stalled:
            disks(host, False)
    _check_writes(cluster, others, writers)


@pytest.mark.exhaustive
def test_a_restart_while_the_disk_of_etcds_leader_stalls(
    network: Network, tmp_path: Path, weights: str, disks: Callable[[str, bool], None]
) -> None:
    etcd = Etcd(network, ["h1", "h2", "h3"], tmp_path / "etcd")
    etcd.start_all()
    cluster = Cluster(network, tmp_path)
    options = ["--nnodes=3", "--rdzv-backend=etcd", "--rdzv-endpoint", etcd.endpoints]
    options += ["--rdzv-conf=last_call_timeout=5"]
    for host in network.names:
        cluster.agent(host, *options)
    cluster.until_step(20, size=3)
    stalled = etcd.leader()
    disks(stalled, True)
    others = [host for host in network.names if host != stalled]  # it says still that it leads
    cluster.until(lambda: any(map(etcd.leads, others)), "another leader of etcd")
    os.kill(cluster.training(stalled)[0], signal.SIGKILL)
    cluster.until_step(21, 1, size=3)
    time.sleep(2 * LEASE_S)  # longer than any lease that was renewed before
    disks(stalled, False)
    cluster.go()
    assert cluster.wait() == [0] * 3, cluster.output()
    assert f"weights {weights}" in cluster.output()
    cluster.check_views()
    assert "the lease of this host is over" not in cluster.output()
