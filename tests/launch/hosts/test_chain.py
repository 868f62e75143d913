"""The chain is received in a few reads, and then one entry after another."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link, drive, perform_on
from outlast.coordination.replicated.hosts import HostInfo, HostJoined, HostLost
from outlast.coordination.replicated.operations import Failed, Operation, Result
from outlast.coordination.replicated.table import Table, entry_key
from outlast.coordination.stores.store import MemoryStore
from outlast.launch.config.job_spec import Placement
from outlast.launch.hosts.host_group import GroupState
from outlast.launch.hosts.job.many_hosts import ManyHosts
from outlast.launch.hosts.plan import Entry, GiveUp, JobPlan, Start, Take, decode
from outlast.launch.hosts.replicated.membership import ChainFollower

Done = Callable[[Result], None]


class Store:
    """A table whose reads and waits are answered when the test says so."""

    def __init__(self) -> None:
        self.table = Table()
        self.asked: list[Operation] = []
        self.open: list[tuple[Operation, Done]] = []

    def submit(self, operation: Operation, done: Done) -> None:
        self.asked.append(operation)
        self.open.append((operation, done))

    def answer(self) -> None:
        """Answers what can be answered now."""
        waiting, self.open = self.open, []
        for operation, done in waiting:
            if operation.name != "wait_for":
                done(self.table.perform(operation))
            elif operation.key in self.table.keys:
                done(self.table.keys[operation.key])
            else:
                self.open.append((operation, done))


def agrees(follower: ChainFollower, table: Table) -> bool:
    plan = follower.chain.plan
    return list(plan.hosts) == list(table.sessions) and plan.lost.keys() == table.gone.keys()


def test_any_entries_in_any_order_are_received_once_each() -> None:
    for seed in range(20):
        rng, store = random.Random(seed), Store()
        changes: list[Any] = []
        follower = ChainFollower(store.submit, lambda: changes.append(None))  # noqa: B023
        for number in range(130):
            kind = rng.random()
            if kind < 0.2:  # a decision
                store.table.perform(
                    Operation("claim", entry_key(number + 1), Start(0, ()).encode())
                )
            elif store.table.sessions and kind < 0.5:
                lost = rng.choice(list(store.table.sessions))
                store.table.remove(HostLost(lost, f"reason {number}", left=rng.random() < 0.5))
            else:
                store.table.join(HostJoined(HostInfo(f"h{number}", address=f"10.0.0.{number}")))
            if number == 100:
                follower.start()
            if rng.random() < 0.5:
                store.answer()
        while store.open[0][0].key != entry_key(131):
            store.answer()
        assert agrees(follower, store.table)
        entries = [decode(store.table.keys[entry_key(n)]) for n in range(1, 131)]
        assert follower.chain.entries == entries
        assert [op.name for op in store.asked].count("batch") <= 3


def test_the_end_of_the_lease_ends_it() -> None:
    store = Store()
    follower = ChainFollower(store.submit, lambda: None)
    follower.start()
    store.table.join(HostJoined(HostInfo("h")))
    store.answer()
    (_, done) = store.open.pop()
    done(Failed("the lease is over"))
    assert store.open == []
    assert agrees(follower, store.table)


class Joined:
    """The group of a host that has just joined: what it knows of it, and its workers' store."""

    def __init__(self, *entries: Entry) -> None:
        self.chain = entries
        self.workers = MemoryStore()
        self.placements: list[Placement] = []

    def poll(self) -> GroupState:
        return GroupState(chain=self.chain)

    def new_attempt(self, attempt: int) -> None:
        assert not self.placements

    def start(self, placement: Placement) -> None:
        gone = MembershipProtocol(Link(), 0).given_up()
        assert drive(gone, perform_on(self.workers)) == {0, 1}
        self.placements.append(placement)


def test_who_has_a_place_before_it_has_learned_of_the_job_takes_its_ranks_back() -> None:
    hosts = [HostInfo(id=name, name=name, address="127.0.0.1") for name in ("a", "b", "c")]
    first, second, third = map(HostJoined, hosts)
    lost = HostLost("b", "no heartbeat")
    group: Any = Joined(
        first, second, Start(0, ("a", "b")), lost, GiveUp((1,)), third, Take(1, "c")
    )
    given_up = MembershipProtocol(Link(), 0).give_up(frozenset(range(4)))
    drive(given_up, perform_on(group.workers))
    coordinator: Any = ManyHosts.__new__(ManyHosts)
    coordinator._group = coordinator._agent = group
    coordinator._job = SimpleNamespace(nproc=2)
    coordinator._me, coordinator.host_id, coordinator.lease_page = hosts[2], "c", None
    coordinator._plan, coordinator._notices = JobPlan(), None
    coordinator._catch_up()
    (placement,) = group.placements
    assert (placement.place, placement.taken_over) == (1, 1)
