"""The chain is received in a few reads, and then one entry after another."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from outlast.coordination.replicated.hosts import HostInfo, HostJoined, HostLost
from outlast.coordination.replicated.operations import Failed, Operation, Result
from outlast.coordination.replicated.table import Table, entry_key
from outlast.launch.hosts.plan import Start
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
    chain = follower.chain
    return list(chain.hosts) == list(table.sessions) and chain.gone == table.gone.keys()


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
        assert follower.chain.entries == [store.table.keys[entry_key(n)] for n in range(1, 131)]
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
