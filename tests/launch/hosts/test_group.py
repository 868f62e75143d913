"""A group of agents: real processes, one address of this machine each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

MakeRun = Callable[..., Any]


def test_three_hosts_meet_at_the_endpoint_of_the_first(run: MakeRun) -> None:
    here = run()
    hosts = [here.host(number) for number in (3, 4, 2)]  # the endpoint comes last
    ids = {host.joined()["id"] for host in hosts}
    assert len(ids) == 3
    for host in hosts:
        state = host.ask("until", hosts=["127.0.0.2", "127.0.0.3", "127.0.0.4"])
        assert state["leader"] == "127.0.0.2"
        assert state["lease_ok"]
    # All see one store.
    sums = [host.ask("store", "add", "n", 1) for host in hosts]
    assert sums == [1, 2, 3]
    assert hosts[0].ask("store", "claim", "who", "three") == "three"
    assert hosts[1].ask("store", "claim", "who", "four") == "three"
    hosts[2].begin("store", "wait_for", "later", None)
    hosts[0].ask("store", "put", "later", "now")
    assert hosts[2].answer() == "now"
    hosts[0].leave()
    state = hosts[1].ask("until", left=["127.0.0.3"])
    assert state["hosts"] == [s for s in state["hosts"] if s != "127.0.0.3"]


@pytest.mark.slow
def test_operations_of_all_hosts_at_once_lose_nothing(run: MakeRun) -> None:
    hosts = run().start(2, 3, 4)
    for host in hosts:
        host.begin("many", "n", 200)
    sums = [total for host in hosts for total in host.answer()]
    assert sorted(sums) == list(range(1, 601))
