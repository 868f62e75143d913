"""The store on a faulty etcd: members that return, a full database, an expired certificate."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from etcd_cluster import NET_S, Cluster, Member, ask, etcd_stores, etcdctl
from outlast.coordination.stores.etcd.connection import Security, diagnose
from outlast.coordination.stores.etcd.store import EtcdStore
from outlast.errors import StoreError

pytestmark = pytest.mark.slow


def add_again(cluster: Cluster, member: Member) -> None:
    """What the operator does about a member that has lost its data."""
    lines = etcdctl(cluster, "member", "list").splitlines()
    number = next(line.split(",")[0] for line in lines if f", {member.name}," in line)
    etcdctl(cluster, "member", "remove", number)
    peer = f"http://127.0.0.1:{member.peer_port}"
    deadline = time.monotonic() + NET_S
    while True:
        try:
            etcdctl(cluster, "member", "add", member.name, f"--peer-urls={peer}")
            break
        except AssertionError as e:  # it waits until the others have been connected for a while
            if "unhealthy cluster" not in str(e) or time.monotonic() > deadline:
                raise
    member._options = [*member._options, "--initial-cluster-state", "existing"]


@pytest.mark.parametrize("folder", ["its own", "empty"])
def test_a_member_that_returns_takes_part_again(folder: str) -> None:
    with (
        Cluster(3) as cluster,
        contextlib.closing(cluster.client()),
        etcd_stores(cluster) as make,
    ):
        store = make()
        store.append("log", b"1")
        lost = cluster.leader()
        lost.end()
        store.append("log", b"2")
        if folder == "empty":
            shutil.rmtree(cluster.folder / lost.name)
            cluster.restart(lost)
            assert lost._process is not None
            assert lost._process.wait(NET_S)  # the others have not forgotten it
            store.append("log", b"3")
            add_again(cluster, lost)
        cluster.restart(lost)
        while not (ask(f"{lost.url}/v3/kv/range", '{"key": "AA=="}') or {}).get("header"):
            pass  # a linearizable read, which needs the leader
        next(member for member in cluster.members if member is not lost).end()
        store.append("log", b"4")  # by a majority that it belongs to
        assert store.read("log") == (b"124" if folder == "its own" else b"1234")


def test_a_member_that_returns_with_an_old_copy_of_its_data_loses_no_write() -> None:
    with (
        Cluster(3) as cluster,
        contextlib.closing(cluster.client()),
        etcd_stores(cluster) as make,
    ):
        store = make()
        leader = cluster.leader()
        old = next(member for member in cluster.members if member is not leader)
        data, copy = cluster.folder / old.name, cluster.folder / "copy"
        old.end()
        shutil.copytree(data, copy)
        cluster.restart(old)
        expected = b""
        for number in range(50):
            store.append("log", b"%d " % number)
            expected += b"%d " % number
        old.end()
        shutil.rmtree(data)
        copy.rename(data)
        cluster.restart(old)  # it learns what it lacks from the leader, or ends
        for number in range(50, 100):
            store.append("log", b"%d " % number)
            expected += b"%d " % number
        assert store.read("log") == expected


def test_a_full_database_refuses_writes_until_it_has_room_again() -> None:
    with (
        Cluster(options=["--quota-backend-bytes", str(16 << 20)]) as cluster,
        contextlib.closing(cluster.client()) as client,
        contextlib.closing(EtcdStore(client, "/outlast/full/", "s")) as store,
    ):
        lease = client.repeat("/v3/lease/grant", {"TTL": "600"}, NET_S)["ID"]
        store.append("log", b"1")
        with pytest.raises(StoreError, match=r"'large': .*exceeded.*etcdctl alarm disarm"):
            for _ in range(100):
                store.put("large", b"x" * 1_000_000)
        with pytest.raises(StoreError, match="space exceeded"):
            store.append("log", b"2")
        # Hosts live on: a renewal writes nothing.
        assert store.read("log") == b"1"
        renewed = client.repeat("/v3/lease/keepalive", {"ID": lease}, NET_S)
        assert int(renewed["result"]["TTL"]) == 600
        now = client.repeat("/v3/kv/range", {"key": "AA=="}, NET_S)["header"]["revision"]
        client.repeat("/v3/kv/compaction", {"revision": now, "physical": True}, NET_S)
        client.repeat("/v3/maintenance/defragment", {}, NET_S)
        etcdctl(cluster, "alarm", "disarm")
        store.append("log", b"3")
        assert store.read("log") == b"13"


def certificate(folder: Path, name: str, days: int) -> tuple[str, str]:
    """The files of a certificate for 127.0.0.1, signed by `ca.pem` in this folder, and its key."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("req", "-newkey", "rsa:2048", "-nodes", "-subj")
    if not (folder / "ca.pem").exists():
        openssl(*new, "/CN=ca", "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl(*new, f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
    sign = ("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key")
    sign += ("-CAcreateserial", "-days", str(days), "-extfile", "names")
    openssl(*sign, "-out", f"{name}.pem")
    return str(folder / f"{name}.pem"), str(folder / f"{name}.key")


def test_a_member_whose_certificate_has_expired_is_named_and_left_out(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    good, expired = certificate(tmp_path, "good", 2), certificate(tmp_path, "expired", -1)
    security = Security(cacert=str(tmp_path / "ca.pem"))
    cluster = Cluster(3, ["--cert-file", good[0], "--key-file", good[1]])
    first = cluster.members[0]
    first._options = ["--cert-file", expired[0], "--key-file", expired[1]]
    with cluster, contextlib.closing(cluster.client(security)) as client:
        said = diagnose(cluster.endpoints[0], security, NET_S)
        assert said.endswith("is not valid for it (certificate has expired): renew it")
        assert diagnose(cluster.endpoints[1], security, NET_S) == ""
        client._current = 0
        with contextlib.closing(EtcdStore(client, "/outlast/expired/", "s")) as store:
            store.append("log", b"1")
            client._current = 0  # as after a failure of the others
            store.append("log", b"2")
            assert store.read("log") == b"12"
