"""The heartbeats of monitor processes, without processes: on one host, and in rings per host."""

from __future__ import annotations

import dataclasses
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from fake_clock import FakeClock
from outlast.coordination.barrier import lost_members
from outlast.coordination.decision import ViewRecord
from outlast.coordination.ops import Link, Op, perform_on, run
from outlast.coordination.stores.store import HOST_KEYS, MemoryStore
from outlast.inprocess.monitor.heartbeat_ring import HeartbeatRing
from outlast.inprocess.timeouts import Timeouts

TIMEOUT_S = 10.0


class HostServer:
    """A store: the keys of a host are in a table of its own."""

    def __init__(self, shared: MemoryStore) -> None:
        self.shared, self.own = shared, MemoryStore()
        self.views_read = 0
        self.available = True
        self.link = Link("call/", self._operate)

    def _operate(self, op: Op) -> Any:
        return perform_on(self.own if op.key.startswith(HOST_KEYS) else self.shared)(op)

    def perform(self, coroutine: Coroutine[Op, Any, Any]) -> Any:
        return run(coroutine)

    def view(self, iteration: int) -> ViewRecord:
        self.views_read += 1
        return ViewRecord(iteration, (0, 1, 2, 3))

    def lost_members(self) -> frozenset[int]:
        found: frozenset[int] = self.perform(lost_members(self.link))
        return found


def rings(
    clock: FakeClock, *, per_host: bool
) -> tuple[list[HeartbeatRing], MemoryStore, list[int]]:
    """Members 0 and 1 on one host, 2 and 3 on another; what is reported."""
    shared, reported = MemoryStore(), list[int]()
    servers = [HostServer(shared), HostServer(shared)]
    made = []
    for member in range(4):
        page: Any = SimpleNamespace(member=member, iteration=0)
        durations = dataclasses.replace(Timeouts().in_seconds(), heartbeat=TIMEOUT_S)
        plan: Any = SimpleNamespace(
            page=page, prefix="call/", durations=durations, host_ring=per_host
        )
        server: Any = servers[member // 2]
        reports: Any = SimpleNamespace(unresponsive=reported.append)
        made.append(HeartbeatRing(plan, clock, server, reports))
    return made, shared, reported


@pytest.mark.parametrize("per_host", [False, True])
def test_a_silent_member_is_reported_by_the_one_that_watches_it(per_host: bool) -> None:
    clock = FakeClock()
    members, shared, reported = rings(clock, per_host=per_host)
    for _ in range(3):
        for ring in members:
            ring.beat()
        clock.advance(1.0)
    assert [ring.watched for ring in members] == ([1, 0, 3, 2] if per_host else [1, 2, 3, 0])
    before = shared.ops.copy()
    for _ in range(12):
        for ring in (members[0], *members[2:]):
            ring.beat()
        clock.advance(1.0)
    assert reported == [1]
    assert members[0].watched == (None if per_host else 2)
    # Rings per host cost the store of all hosts no operation while all is well.
    adds = shared.ops["add"] - before["add"]
    assert (adds == 0) is per_host


def test_nobody_is_judged_by_the_time_that_the_store_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    members, shared, reported = rings(clock, per_host=False)
    for ring in members:
        ring.beat()
    add = shared.add

    def slowly(key: str, amount: int) -> int:
        clock.advance(2.0)
        return add(key, amount)

    monkeypatch.setattr(shared, "add", slowly)
    for _ in range(20):  # only member 0 finds the time to look
        clock.advance(1.0)
        members[0].beat()
    assert reported == []
    monkeypatch.undo()
    for _ in range(12):
        clock.advance(1.0)
        members[0].beat()
    assert reported == [1]


def test_a_member_that_comes_later_is_watched() -> None:
    clock = FakeClock()
    members, _, reported = rings(clock, per_host=True)
    members[0].beat()
    assert members[0].watched is None
    clock.advance(1.0)
    members[1].beat()
    members[0].beat()
    assert members[0].watched == 1
    for _ in range(11):
        clock.advance(1.0)
        members[0].beat()
    assert reported == [1]


def test_one_member_of_a_host_reads_the_view_for_all() -> None:
    clock = FakeClock()
    members, _, _ = rings(clock, per_host=True)
    servers: list[Any] = [members[0]._store, members[2]._store]
    for iteration in range(3):
        for ring in members:
            ring._page.iteration = iteration
            ring.beat()
        clock.advance(1.0)
    for ring in members:
        ring.beat()
    # Once more in the first iteration, in which the second member is there when the first has read.
    assert [ring.watched for ring in members] == [1, 0, 3, 2]
    assert [server.views_read for server in servers] == [3, 3]
