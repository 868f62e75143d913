"""A group of replicas without faults: the founder, joiners, operations from all of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from outlast.coordination.replicated import table
from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.replicated.messages import decode, encode
from outlast.coordination.replicated.operations import (
    MESSAGE_BYTES,
    Failed,
    Keys,
    Operation,
    Result,
)
from outlast.coordination.replicated.quorum import Configuration
from outlast.coordination.replicated.replica import Replica
from outlast.coordination.replicated.timing import Timing


class Group:
    """Replicas that get all messages at once; they are encoded on the way."""

    def __init__(self, hosts: int, *, durable: bool = False) -> None:
        self.now = 0.0
        names = [f"h{n}" for n in range(hosts)]
        founding = Configuration(frozenset(names[:1]))
        self.replicas = {
            name: Replica(
                name,
                Timing(),
                random.Random(0),
                founding=founding if name == "h0" else None,
                durable=durable,
            )
            for name in names
        }
        self.results: dict[tuple[str, int], Result] = {}
        if durable:
            self.wrote("h0")
        self.run(0.0)
        for name in names:
            self.replicas["h0"].add_host(HostInfo(name, nproc=2), self.now)
        self.run(5.0)

    def run(self, seconds: float) -> None:
        """Passes messages, and lets time pass."""
        until = self.now + seconds
        while True:
            for replica in self.replicas.values():
                replica.tick(self.now)
            while self.exchange():
                pass
            if self.now >= until:
                return
            self.now = min(
                until, max(r.next_tick() for r in self.replicas.values()), self.now + 0.1
            )

    def exchange(self) -> bool:
        sent = []
        for name, replica in self.replicas.items():
            sent += [(name, to, message) for to, message in replica.outbox()]
            for ticket, result in replica.results():
                self.results[name, ticket] = result
        for sender, to, message in sent:
            if to in self.replicas:
                self.replicas[to].receive(sender, decode(encode(message)), self.now)
        return bool(sent)

    def wrote(self, *names: str) -> None:
        """The disks of these have everything."""
        for name in names:
            self.replicas[name].wrote(self.replicas[name].configurations)

    def start(self, host: str, *args: Any, **kwargs: Any) -> tuple[str, int]:
        return host, self.replicas[host].submit(Operation(*args, **kwargs), self.now)

    def do(self, host: str, *args: Any, **kwargs: Any) -> Result:
        asked = self.start(host, *args, **kwargs)
        self.run(0.0)
        return self.results[asked]


def test_operations_of_all_hosts_see_one_table() -> None:
    group = Group(3)
    waiting = group.start("h2", "wait_for", "late")
    assert group.do("h1", "put", "a", b"\xff\x00") is None
    assert group.do("h2", "read", "a") == b"\xff\x00"
    assert group.do("h0", "claim", "a", b"mine") == b"\xff\x00"
    assert [group.do(f"h{n}", "add", "n", amount=n) for n in range(3)] == [0, 1, 3]
    assert group.do("h1", "append", "log", b"x") is None
    assert group.do("h2", "append", "log", b"y") is None
    assert group.do("h0", "read", "log") == b"xy"
    assert group.do("h1", "compare_set", "new", b"1") == b"1"
    assert group.do("h1", "compare_set", "new", b"2", expected=b"0") == b"1"
    assert group.do("h1", "compare_set", "none", b"2", expected=b"0") is None
    assert group.do("h2", "keys", "n") == Keys(("n", "new"))
    assert group.do("h2", "delete", "new") == 1
    batch = (Operation("add", "n", amount=1), Operation("check", "new"), Operation("read", "a"))
    assert group.do("h2", "batch", operations=batch) == [4, 0, b"\xff\x00"]
    assert waiting not in group.results
    group.do("h1", "put", "late", b"now")
    assert group.results[waiting] == b"now"


def test_hosts_are_in_the_table() -> None:
    group = Group(3)
    joined = group.do("h1", "read", "hosts/joined")
    assert isinstance(joined, bytes)
    assert [HostInfo.decode(line) for line in joined.splitlines()] == [
        HostInfo(f"h{n}", nproc=2) for n in range(3)
    ]
    assert group.do("h1", "read", "hosts/events") == b"3"
    waiting = group.start("h1", "wait_for", "hosts/event/4")
    group.replicas["h2"].leave("it has finished", group.now)
    group.run(0.0)
    lost = b'{"id": "h2", "reason": "it has finished", "orderly": true}'
    assert group.results[waiting] == b"hosts/lost\n" + lost
    assert group.do("h0", "read", "hosts/lost") == lost + b"\n"
    refused = group.replicas["h2"].refused
    assert refused is not None
    assert refused.orderly


def test_a_silent_host_is_lost() -> None:
    group = Group(3)
    del group.replicas["h2"]
    group.run(10.0)
    lost = group.do("h1", "read", "hosts/lost")
    assert isinstance(lost, bytes)
    assert b"h2" in lost


def test_messages_are_short_whatever_the_values_are() -> None:
    group = Group(2)
    value = bytes(range(256)) * 4096  # 1 MiB, of which half would be two characters each in JSON
    leader, other = group.replicas["h0"], group.replicas["h1"]
    asked = [group.start("h0", "put", f"k{n}", value) for n in range(20)]
    asked += [group.start("h1", "put", f"l{n}", value) for n in range(20)]
    limit = MESSAGE_BYTES + 2 * len(value)
    longest = []
    for _ in range(60):  # each replica's messages to the other, one round after another
        leader.tick(group.now)
        for sender, to in ((leader, other), (other, leader)):
            for _, message in sender.outbox():
                longest.append(len(encode(message)))
                to.receive(sender.me, decode(encode(message)), group.now)
            group.results |= {(sender.me, ticket): result for ticket, result in sender.results()}
        group.now += 0.01
    assert max(longest) < limit
    assert max(longest) > MESSAGE_BYTES
    assert all(group.results[each] is None for each in asked)
    reads = [group.start("h1", "read", f"k{n}") for n in range(20)]
    group.run(1.0)
    assert all(group.results[each] == value for each in reads)


def test_a_full_store_refuses_instead_of_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MOST_BYTES", 10_000)
    group = Group(2)
    assert group.do("h1", "put", "a", b"x" * 9_000) is None
    refused = group.do("h1", "put", "b", b"x" * 9_000)
    assert isinstance(refused, Failed)
    assert "the store is full" in refused.reason
    assert group.do("h1", "put", "a", b"") is None
    assert group.do("h1", "put", "b", b"x" * 9_000) is None


def test_a_sum_of_more_than_64_bits_is_refused() -> None:
    group = Group(2)
    assert group.do("h1", "add", "n", amount=(1 << 63) - 1) == (1 << 63) - 1
    refused = group.do("h1", "add", "n", amount=1)
    assert isinstance(refused, Failed)
    assert "64 bits" in refused.reason


def test_new_voters_decide_alone_when_a_quorum_has_them_on_disk() -> None:
    group = Group(3, durable=True)
    group.run(20.0)
    leader, *others = group.replicas.values()
    assert leader.voters == frozenset(), "they change"
    assert group.do("h1", "put", "k", b"v") is None
    assert all(r.lease_until > group.now for r in group.replicas.values())
    group.wrote("h1", "h2")
    group.run(1.0)
    assert leader.voters == frozenset(), "h0 is alone a quorum of those before"
    group.wrote("h0")
    group.run(0.0)
    assert leader.voters == {"h0", "h1", "h2"}
    group.run(1.0)
    assert others[1].voters == {"h0", "h1", "h2"}
