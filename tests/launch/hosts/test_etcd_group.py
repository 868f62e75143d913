"""Groups of hosts over real etcd: each host a process with an address of its own."""

from __future__ import annotations

import base64
import contextlib
import re
import signal
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etcd_cluster import NET_S, Cluster, require_etcd
from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.stores.etcd import layout
from outlast.coordination.stores.etcd.client import EtcdClient
from outlast.coordination.stores.etcd.connection import Security
from outlast.coordination.stores.tcp_client import TcpClient
from outlast.errors import LaunchError
from outlast.launch.hosts.etcd import membership
from outlast.launch.hosts.etcd.group import EtcdGroup
from outlast.launch.hosts.etcd.membership import Admission
from outlast.launch.hosts.host_group import GroupSpec
from outlast.system.lease_page import LeasePage
from procs import free_port

RunFactory = Callable[..., Any]


@pytest.fixture
def on(run: RunFactory) -> Callable[[Cluster], Any]:
    """`on(cluster, lease_s=...)`: a run whose hosts meet in `cluster`."""

    def make(cluster: Cluster, lease_s: float = 5.0) -> Any:
        made = run(lease_s)
        made.endpoints = [(each.host, each.port) for each in cluster.endpoints]
        begin = made.host
        made.host = lambda number, **options: begin(number, **{"backend": "etcd"} | options)
        return made

    return make


def start(run: Any, *numbers: int) -> list[Any]:
    """Starts hosts one after the other; returns when all know of all."""
    hosts = []
    for number in numbers:
        hosts.append(run.host(number))
        hosts[-1].joined()
    for host in hosts:
        host.ask("until", hosts=[each.address for each in hosts])
    return hosts


def keys_of(etcd: Cluster, run: Any) -> list[str]:
    """All keys of a run in etcd."""
    top = f"/outlast/{run.run_id}/"
    body = {"key": base64.b64encode(top.encode()).decode(), "keys_only": True}
    body["range_end"] = base64.b64encode(top[:-1].encode() + b"0").decode()
    with contextlib.closing(etcd.client()) as client:
        found = client.repeat("/v3/kv/range", body, NET_S).get("kvs", ())
    return [base64.b64decode(kv["key"]).decode() for kv in found]


def test_hosts_meet_share_a_store_and_leave_nothing_behind(etcd: Cluster, on: RunFactory) -> None:
    run = on(etcd)
    first, second = run.host(2), run.host(3)
    said = [host.joined() for host in (first, second)]
    for host in (first, second):
        assert host.ask("until", hosts=["127.0.0.2", "127.0.0.3"])["lease_ok"]
    leaders = {host.ask("state")["leader"] for host in (first, second)}
    assert len(leaders) == 1

    first.ask("store", "put", "job/k", "v")
    assert second.ask("store", "wait_for", "job/k", None) == "v"
    for host in (first, second):
        host.ask("new_attempt", 1)
    one, two = (TcpClient("127.0.0.1", each["store_port"], NET_S) for each in said)
    with contextlib.closing(one), contextlib.closing(two):
        one.append("log", b"a")
        assert one.read("log") == b"a"  # an append has no answer: it is done before this one
        two.append("log", b"b")
        assert (one.add("n", 2), two.add("n", 3)) == (2, 5)
        assert two.read("log") == b"ab"
        assert two.read("job/k") is None  # the agents' keys are out of reach
    second.ask("new_attempt", 2)
    two = TcpClient("127.0.0.1", said[1]["store_port"], NET_S)
    with contextlib.closing(two):
        assert two.read("log") is None

    second.leave()
    assert first.ask("until", hosts=["127.0.0.2"])["left"] == ["127.0.0.3"]
    assert keys_of(etcd, run) != []
    first.leave()
    assert keys_of(etcd, run) == []


@pytest.mark.slow
def test_a_lost_host_comes_back_as_a_new_one(etcd: Cluster, on: RunFactory) -> None:
    run = on(etcd, lease_s=1.0)
    first, stopped = start(run, 2, 3)
    stopped.send(signal.SIGSTOP)
    state = first.ask("until", hosts=["127.0.0.2"])
    assert "its lease has expired: etcd had no sign of life from it for" in str(state["lost"])
    first.ask("store", "put", "k", "new")
    stopped.send(signal.SIGCONT)
    assert "lease of this host is over" in stopped.ask("until", lease_ok=False)["error"]
    again = run.host(3)  # it finds the store as the others have it
    again.joined()
    assert again.ask("store", "read", "k") == "new"
    assert len(again.ask("state")["lost"]) == 1


@pytest.mark.slow
def test_a_job_that_begins_again_finds_an_empty_store(etcd: Cluster, on: RunFactory) -> None:
    run = on(etcd, lease_s=1.0)
    [before] = start(run, 2)
    before.ask("store", "put", "completed", "yes")
    before.close()
    after = run.host(2)  # it waits until the lease of the one before is over
    after.joined()
    assert after.ask("store", "read", "completed") is None
    assert after.ask("state")["lost"] == {}


@pytest.mark.slow
def test_an_agent_waits_for_the_lease_of_the_one_before_that_etcd_starts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each new leader of etcd, as after a restart, starts the time of all leases."""
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now, sleep=time.sleep)
    monkeypatch.setattr(membership, "time", clock)
    said: list[str] = []
    refused: list[str] = []

    def join(name: str) -> None:
        host = HostInfo(name, name, "10.0.0.1", 1, 2)
        lease = int(client.repeat("/v3/lease/grant", {"TTL": "600"}, NET_S)["ID"])
        try:
            Admission(client, "r", host, lease, 10.0, said.append).join(lambda: "g")
        except LaunchError as e:
            refused.append(str(e))

    class Counting(EtcdClient):
        looks = threading.Semaphore(0)

        def repeat(self, path: str, body: Any, limit: float) -> Any:
            answer = super().repeat(path, body, limit)
            if body == layout.range_of(membership.top_of("r") + b"current"):
                self.looks.release()
            return answer

    with Cluster() as cluster:
        client = Counting(cluster.endpoints, Security())
        join("before")
        after = threading.Thread(target=join, args=("after",))
        after.start()

        def looks_twice() -> None:  # the first may have begun before
            Counting.looks = threading.Semaphore(0)
            for _ in range(3):
                assert Counting.looks.acquire(timeout=NET_S)

        looks_twice()
        assert "another agent at 10.0.0.1 is in this run" in said[0]
        clock.now = 8.0
        looks_twice()
        cluster.members[0].end()
        cluster.restart(cluster.members[0])
        looks_twice()
        clock.now = 17.0
        looks_twice()
        assert not refused
        clock.now = 19.0
        after.join(NET_S)
        assert "already in this run, with another agent (before)" in refused[0]
        client.close()


@pytest.mark.slow
def test_a_lease_that_ends_while_its_host_joins_is_replaced(
    etcd: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when etcd did not answer while the host waited for the lease of the agent before."""
    leases: list[int] = []
    join = Admission.join

    def late_join(self: Admission, new_name: Callable[[], str]) -> bytes:
        leases.append(self._lease)
        if len(leases) == 1:
            with contextlib.closing(etcd.client()) as client:
                client.repeat("/v3/lease/revoke", {"ID": str(self._lease)}, NET_S)
        return join(self, new_name)

    monkeypatch.setattr(Admission, "join", late_join)
    page = LeasePage.create(tmp_path)
    endpoints = tuple((each.host, each.port) for each in etcd.endpoints)
    group = EtcdGroup(GroupSpec(run_id="late", endpoints=endpoints, page=page, lease_s=NET_S))
    group.start()
    assert len(set(leases)) == 2
    group.store.put("k", b"v")
    assert group.poll().leader == group.me.id
    group.close(leave=True)
    page.close()


@pytest.mark.slow
def test_a_host_that_etcd_does_not_answer_while_it_joins_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the disk of etcd's leader stalls for longer than the limit of a request."""
    require_etcd()
    join, limit_s, joins = Admission.join, membership.LIMIT_S, 0
    said: list[str] = []

    with Cluster() as cluster:

        def join_in_a_stall(self: Admission, new_name: Callable[[], str]) -> bytes:
            nonlocal joins
            joins += 1
            if joins > 1:
                return join(self, new_name)
            cluster.members[0].signal(signal.SIGSTOP)
            monkeypatch.setattr(membership, "LIMIT_S", 0.2)
            try:
                return join(self, new_name)
            finally:
                monkeypatch.setattr(membership, "LIMIT_S", limit_s)
                cluster.members[0].signal(signal.SIGCONT)

        monkeypatch.setattr(Admission, "join", join_in_a_stall)
        page = LeasePage.create(tmp_path)
        endpoints = tuple((each.host, each.port) for each in cluster.endpoints)
        spec = GroupSpec(
            run_id="stall", endpoints=endpoints, page=page, lease_s=NET_S, say=said.append
        )
        group = EtcdGroup(spec)
        group.start()
        assert any("did not answer for 0.2 s" in line for line in said)
        assert group.poll().leader == group.me.id
        group.close(leave=True)
        page.close()
    assert joins == 2


@pytest.mark.slow
def test_hosts_that_differ_are_refused(etcd: Cluster, on: RunFactory) -> None:
    run = on(etcd, lease_s=1.0)
    first = run.host(2, settings=[["script", "a.py"], ["--nproc-per-node", "2"]])
    first.joined()
    said = run.host(3, settings=[["script", "a.py"], ["--nproc-per-node", "4"]]).failed()
    assert said.startswith("--nproc-per-node differs between the hosts of this run: ")
    assert re.search(" has '2', .* has '4'$", said)
    while not (refused := first.ask("state")["refused"]):
        pass
    assert refused[0].startswith("refused ")
    assert said in refused[0]


@pytest.mark.slow
def test_two_agents_at_one_address(etcd: Cluster, on: RunFactory) -> None:
    run = on(etcd, lease_s=1.0)
    run.host(2).joined()
    said = run.host(2).failed()
    assert "is already in this run, with another agent" in said
    assert "--rdzv-id" in said


def test_an_endpoint_that_is_no_etcd_is_named(on: RunFactory, etcd: Cluster) -> None:
    run = on(etcd)
    port = free_port()
    said = run.host(2, endpoints=[("127.0.0.1", port)], join_limit_s=0.5).failed()
    assert said.startswith(f"--rdzv-endpoint: nothing answers at 127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ({"user": "me"}, "user=me: no password; set the environment variable OUTLAST_ETCD_PASS"),
        ({"user": "me", "password_file": "/no/file"}, "password_file=/no/file: No such file"),
        ({"password": "x"}, "other users could read it"),
        ({"cert": "c.pem"}, "cert and key are only of use together"),
        ({"protocol": "gopher"}, "protocol=gopher: expected http or https"),
        ({"protocol": "http", "cacert": "ca.pem"}, "protocol=http conflicts with cacert"),
    ],
)
def test_wrong_settings_are_named(conf: dict[str, str], expected: str, tmp_path: Path) -> None:
    page = LeasePage.create(tmp_path)
    with pytest.raises(LaunchError, match=re.escape(expected)):
        EtcdGroup(GroupSpec(run_id="r", endpoints=(("127.0.0.1", 2379),), page=page, conf=conf))
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_no_host_is_lost_with_a_member_of_etcd(on: RunFactory, how: signal.Signals) -> None:
    require_etcd()
    with Cluster(3) as cluster, contextlib.closing(cluster.client()):
        run = on(cluster, lease_s=3.0)
        hosts = start(run, 2, 3)
        leader = cluster.leader()
        for host in hosts:
            host.begin("many", "n", 150)
        leader.signal(how)
        sums = [n for host in hosts for n in host.answer()]
        assert sorted(sums) == list(range(1, 301))
        for host in hosts:
            state = host.ask("state")
            assert state["lease_ok"]
            assert state["lost"] == {}


@pytest.mark.slow
def test_without_etcd_every_host_stops(on: RunFactory) -> None:
    require_etcd()
    with Cluster() as cluster, contextlib.closing(cluster.client()):
        run = on(cluster, lease_s=1.0)
        hosts = start(run, 2, 3)
        hosts[0].begin("store", "wait_for", "never", None)
        cluster.members[0].end()
        assert "lease of this host is over" in hosts[0].line()["error"]
        state = hosts[1].ask("until", lease_ok=False)
        assert f"at etcd {cluster.rdzv_endpoint}" in state["error"]
