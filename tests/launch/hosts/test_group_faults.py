"""Hosts that die, stop, or are restarted: who goes on, who stops, and what is kept."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.system.lease_page import LeasePage

MakeRun = Callable[..., Any]
LEASE_S = 2.0


@pytest.mark.slow
def test_the_store_survives_the_death_of_its_leader(run: MakeRun) -> None:
    first, second, third = run(LEASE_S).start(2, 3, 4)
    assert first.ask("store", "claim", "decided", "yes") == "yes"
    second.begin("store", "wait_for", "later", None)
    third.begin("many", "n", 500)
    first.send(signal.SIGKILL)
    # Operations that were under way are performed once each.
    assert third.answer() == list(range(1, 501))
    assert third.ask("store", "claim", "decided", "no") == "yes"
    state = third.ask("until", lost=["127.0.0.2"])
    assert state["leader"] in ("127.0.0.3", "127.0.0.4")
    assert state["hosts"] == ["127.0.0.3", "127.0.0.4"]
    third.ask("store", "put", "later", "now")
    assert second.answer() == "now"


@pytest.mark.slow
def test_a_minority_stops(run: MakeRun) -> None:
    hosts = run(LEASE_S).start(2, 3, 4)
    for host in hosts[1:]:
        host.send(signal.SIGKILL)
    state = hosts[0].ask("until", lease_ok=False)
    assert "its lease ended" in state["error"]
    hosts[0].begin("store", "put", "k", "v")
    error = hosts[0].line()["error"]
    assert error.startswith("StoreError: the store of run")
    assert "its lease ended" in error


@pytest.mark.slow
def test_the_first_of_two_hosts_goes_on_alone_and_the_second_does_not(run: MakeRun) -> None:
    here = run(LEASE_S)
    first, second = here.start(2, 3)
    second.send(signal.SIGKILL)
    assert first.ask("until", lost=["127.0.0.3"])["lease_ok"]
    third = here.host(3)
    third.joined()
    third.ask("until", hosts=["127.0.0.2", "127.0.0.3"], voters=2)
    first.send(signal.SIGKILL)
    assert "its lease ended" in third.ask("until", lease_ok=False)["error"]


@pytest.mark.slow
def test_a_stopped_host_is_lost_and_says_so_when_it_wakes_up(run: MakeRun) -> None:
    here = run(LEASE_S)
    first, second = here.start(2, 3)
    third = here.host(4)
    page = LeasePage.open(third.joined()["page"])
    assert page.valid()
    third.begin("until", lease_ok=False)
    third.send(signal.SIGSTOP)
    assert "no heartbeat" in first.ask("until", lost=["127.0.0.4"])["lost"]["127.0.0.4"]
    assert not page.valid()  # before others go on without it
    page.close()
    second.ask("store", "put", "k", "new")
    third.send(signal.SIGCONT)
    assert "it was stopped, or could not reach" in third.answer()["error"]
    third.begin("store", "put", "k", "stale")
    assert "StoreError" in third.line()["error"]
    assert second.ask("store", "read", "k") == "new"


@pytest.mark.slow
def test_the_stopped_leader_is_replaced_and_reads_nothing_stale(run: MakeRun) -> None:
    first, second, _ = run(LEASE_S).start(2, 3, 4)
    first.ask("store", "put", "k", "old")
    first.send(signal.SIGSTOP)
    second.ask("until", lost=["127.0.0.2"])
    second.ask("store", "put", "k", "new")
    first.begin("store", "read", "k")  # it waits in its stdin
    first.send(signal.SIGCONT)
    assert "StoreError" in first.line()["error"]


@pytest.mark.slow
def test_a_restarted_endpoint_joins_the_group_that_lives(run: MakeRun) -> None:
    here = run(LEASE_S)
    first, second, _ = here.start(2, 3, 4)
    first.send(signal.SIGKILL)
    again = here.host(2, silence_s=1.5)
    again.joined()
    state = again.ask("until", hosts=["127.0.0.2", "127.0.0.3", "127.0.0.4"])
    assert list(state["lost"]) == ["127.0.0.2"]
    assert second.ask("state")["leader"] == state["leader"]
    assert state["leader"] != "127.0.0.2"


@pytest.mark.slow
def test_all_hosts_leave_in_order(run: MakeRun) -> None:
    here = run()
    hosts = here.start(2, 3, 4)
    hosts[0].leave()  # the leader
    assert hosts[1].ask("until", left=["127.0.0.2"])["lease_ok"]
    assert hosts[1].ask("store", "add", "n", 1) == 1
    for host in hosts[1:]:
        host.begin("close", leave=True)
    for host in hosts[1:]:
        assert host.line() == {"event": "closed"}


@pytest.mark.slow
def test_hosts_die_one_after_the_other_and_others_come(run: MakeRun) -> None:
    here = run(LEASE_S, endpoints=3)
    hosts = {number: here.host(number) for number in (2, 3, 4)}
    for host in hosts.values():
        host.joined()
    for round_number in range(6):
        alive = [f"127.0.0.{number}" for number in hosts]
        for host in hosts.values():
            host.ask("until", hosts=alive, voters=3)
        leader = next(iter(hosts.values())).ask("state")["leader"]
        number = int(leader.rpartition(".")[2])
        hosts.pop(number).send(signal.SIGKILL)
        survivor = next(iter(hosts.values()))
        assert survivor.ask("store", "add", "n", 1) == round_number + 1
        hosts[number] = here.host(number, silence_s=1.5)
        hosts[number].joined()


@pytest.mark.slow
def test_only_the_change_of_voters_waits_for_a_slow_disk(run: MakeRun, tmp_path: Path) -> None:
    here = run(LEASE_S)
    hosts = here.start(2, 3)
    fifo = str(tmp_path / "disk")
    os.mkfifo(fifo)
    for host in hosts:
        host.ask("slow_disk", fifo)
    joined = here.host(4).joined()
    assert hosts[0].ask("until", hosts=["127.0.0.2", "127.0.0.3", "127.0.0.4"])["lease_ok"]
    hosts[0].ask("store", "put", "k", "v")
    page = LeasePage.open(Path(joined["page"]))
    enough = page.deadline + 2 * LEASE_S
    while page.deadline < enough:
        states = [host.ask("state") for host in hosts]
        assert all(state["lease_ok"] for state in states), states
        assert 3 not in [state["voters"] for state in states], "the disk has not written that"
    page.close()
    disk = os.open(fifo, os.O_RDWR)
    assert not hosts[0].ask("until", voters=3)["error"]
    os.close(disk)
