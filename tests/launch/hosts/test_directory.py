"""The directory of the hosts reads the logs once, and then each change alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.replicated.operations import Failed, Operation, Result
from outlast.coordination.replicated.table import Table
from outlast.launch.hosts.replicated.directory import Directory

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


def agrees(directory: Directory, table: Table) -> bool:
    gone = {gone.host.id: (gone.reason, gone.left) for gone in directory.gone}
    return list(directory.hosts) == list(table.sessions) and gone == table.gone


def test_any_changes_in_any_order_are_seen_once_each() -> None:
    for seed in range(20):
        rng, store = random.Random(seed), Store()
        changes: list[Any] = []
        directory = Directory(store.submit, lambda: changes.append(None))  # noqa: B023
        for number in range(30):
            if store.table.sessions and rng.random() < 0.4:
                lost = rng.choice(list(store.table.sessions))
                store.table.remove(lost, f"reason {number}", orderly=rng.random() < 0.5)
            else:
                store.table.join(HostInfo(f"h{number}", address=f"10.0.0.{number}"))
            if number == 10:
                directory.start()
            if rng.random() < 0.5:
                store.answer()
        while store.open[0][0].key != "hosts/event/31":
            store.answer()
        assert agrees(directory, store.table)
        assert [op.name for op in store.asked].count("batch") == 1


def test_the_end_of_the_lease_ends_it() -> None:
    store = Store()
    directory = Directory(store.submit, lambda: None)
    directory.start()
    store.table.join(HostInfo("h"))
    store.answer()
    (_, done) = store.open.pop()
    done(Failed("the lease is over"))
    assert store.open == []
    assert agrees(directory, store.table)
