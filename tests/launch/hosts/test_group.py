"""What both implementations of a group of hosts promise: the agents' own, and etcd. Each host is a
real process, with an address of this machine.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from etcd_cluster import Cluster, require_etcd

MakeRun = Callable[..., Any]


@pytest.fixture(params=["c10d", pytest.param("etcd", marks=pytest.mark.slow)])
def here(
    request: pytest.FixtureRequest, run: MakeRun, etcd_if_installed: Cluster | None
) -> MakeRun:
    """`here(lease_s)`: a run over each of the two."""

    def make(lease_s: float = 5.0) -> Any:
        made = run(lease_s)
        made.votes = request.param == "c10d"
        if request.param == "etcd":
            require_etcd()
            assert etcd_if_installed is not None
            made.endpoints = [(each.host, each.port) for each in etcd_if_installed.endpoints]
            begin = made.host
            made.host = lambda number, **options: begin(number, **{"backend": "etcd"} | options)
        return made

    return make


def test_hosts_meet_and_share_one_store_and_one_chain(here: MakeRun) -> None:
    made = here()
    hosts = [made.host(number) for number in (3, 4, 2)]  # the endpoint of c10d comes last
    ids = {host.joined()["id"] for host in hosts}
    assert len(ids) == 3
    states = [host.ask("until", hosts=["127.0.0.2", "127.0.0.3", "127.0.0.4"]) for host in hosts]
    assert all(state["lease_ok"] for state in states)
    leader = made.hosts[0].ask("state")["leader"]
    assert all(host.ask("state")["leader"] == leader for host in hosts)
    assert leader in states[0]["hosts"]
    # All see one store.
    sums = [host.ask("store", "add", "n", 1) for host in hosts]
    assert sums == [1, 2, 3]
    assert hosts[0].ask("store", "claim", "who", "three") == "three"
    assert hosts[1].ask("store", "claim", "who", "four") == "three"
    hosts[2].begin("store", "wait_for", "later", None)
    hosts[0].ask("store", "put", "later", "now")
    assert hosts[2].answer() == "now"
    # All decide once: who claims an entry at the same time learns which one it has become.
    for number, host in enumerate(hosts):
        host.begin("claim", f"cause {number}", length=3)
    held = [host.answer() for host in hosts]
    assert len(set(held)) == 1
    for host in hosts:
        assert host.ask("until", causes=held[:1])["causes"] == held[:1]
    hosts[0].leave()
    for host in hosts[1:]:
        state = host.ask("until", left=["127.0.0.3"])
        assert sorted(state["hosts"]) == ["127.0.0.2", "127.0.0.4"]
        assert state["causes"] == held[:1]


def test_a_killed_host_is_lost_and_a_stopped_one_is_fenced(here: MakeRun) -> None:
    made = here(2.0)
    first, second, killed, stopped = hosts = [made.host(number) for number in (2, 3, 4, 5)]
    for host in hosts:
        host.joined()
    first.ask("until", hosts=[f"127.0.0.{n}" for n in (2, 3, 4, 5)])
    if made.votes:  # with the leader and one more of the four there is a majority, not of the first
        first.ask("until", voters=4)
    killed.close()
    stopped.send(signal.SIGSTOP)
    state = first.ask("until", hosts=["127.0.0.2", "127.0.0.3"])
    assert set(state["lost"]) == {"127.0.0.4", "127.0.0.5"}, state
    assert state["left"] == []
    length = 6  # four have joined, two are lost
    assert second.ask("claim", "new", length=length) == "new"
    second.ask("store", "put", "k", "new")
    stopped.begin("claim", "stale")
    stopped.send(signal.SIGCONT)
    assert "StoreError" in stopped.line()["error"]
    stopped.begin("store", "put", "k", "stale")
    assert "StoreError" in stopped.line()["error"]
    assert first.ask("store", "read", "k") == "new"
    assert first.ask("until", causes=["new"])["causes"] == ["new"]


@pytest.mark.slow
def test_operations_of_all_hosts_at_once_lose_nothing(run: MakeRun) -> None:
    hosts = run().start(2, 3, 4)
    for host in hosts:
        host.begin("many", "n", 200)
    sums = [total for host in hosts for total in host.answer()]
    assert sorted(sums) == list(range(1, 601))
