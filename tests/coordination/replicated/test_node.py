"""A group of nodes without faults: the founder, joiners, operations from all of them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from outlast.coordination.replicated import table
from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.replicated.messages import decode, encode
from outlast.coordination.replicated.node import Node
from outlast.coordination.replicated.operations import (
    MESSAGE_BYTES,
    Failed,
    Keys,
    Operation,
    Result,
)
from outlast.coordination.replicated.quorum import Configuration, Timing


class Group:
    """Nodes that get all messages at once; they are encoded on the way."""

    def __init__(self, hosts: int, *, slow_disks: bool = False) -> None:
        self.now = 0.0
        names = [f"h{n}" for n in range(hosts)]
        founding = Configuration(frozenset(names[:1]))
        self.nodes = {
            name: Node(
                name,
                Timing(),
                random.Random(0),
                founding=founding if name == "h0" else None,
            )
            for name in names
        }
        self.results: dict[tuple[str, int], Result] = {}
        self._fast_disks = not slow_disks
        self._disks: dict[str, Any] = dict.fromkeys(names)
        self.wrote("h0")
        self.run(0.0)
        for name in names:
            self.nodes["h0"].add_host(HostInfo(name), self.now)
        self.run(5.0)

    def run(self, seconds: float) -> None:
        """Passes messages, and lets time pass."""
        until = self.now + seconds
        while True:
            for node in self.nodes.values():
                node.tick(self.now)
            while self.exchange():
                pass
            if self.now >= until:
                return
            self.now = min(until, max(r.next_tick() for r in self.nodes.values()), self.now + 0.1)

    def exchange(self) -> bool:
        if self._fast_disks:
            self.wrote(
                *(n for n, node in self.nodes.items() if self._disks[n] != node.configurations)
            )
        sent = []
        for name, node in self.nodes.items():
            sent += [(name, to, message) for to, message in node.outbox()]
            for ticket, result in node.results():
                self.results[name, ticket] = result
        for sender, to, message in sent:
            if to in self.nodes:
                self.nodes[to].receive(sender, decode(encode(message)), self.now)
        return bool(sent)

    def wrote(self, *names: str) -> None:
        """The disks of these have everything."""
        for name in names:
            self._disks[name] = self.nodes[name].configurations
            self.nodes[name].wrote(self._disks[name])

    def start(self, host: str, *args: Any, **kwargs: Any) -> tuple[str, int]:
        return host, self.nodes[host].submit(Operation(*args, **kwargs), self.now)

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


def test_hosts_and_decisions_are_one_chain() -> None:
    group = Group(3)
    entries = [json.loads(bytes_of(group.do("h1", "read", f"chain/{n}"))) for n in (1, 2, 3)]
    assert [entry["info"]["id"] for entry in entries] == ["h0", "h1", "h2"]
    assert group.do("h1", "claim", "chain/4", b"decided") == b"decided"
    waiting = group.start("h1", "wait_for", "chain/5")
    group.nodes["h2"].leave("it has finished", group.now)
    group.run(0.0)
    left = {"do": "host lost", "host": "h2", "reason": "it has finished", "left": True}
    assert json.loads(bytes_of(group.results[waiting])) == left
    assert group.do("h0", "claim", "chain/5", b"too late") == group.results[waiting]
    refused = group.nodes["h2"].host.refused
    assert refused is not None
    assert refused.orderly


def bytes_of(result: Result) -> bytes:
    assert isinstance(result, bytes)
    return result


def test_a_silent_host_is_lost() -> None:
    group = Group(3)
    del group.nodes["h2"]
    group.run(10.0)
    assert b'"h2"' in bytes_of(group.do("h1", "read", "chain/4"))


def test_messages_are_short_whatever_the_values_are() -> None:
    group = Group(2)
    value = bytes(range(256)) * 4096  # 1 MiB, of which half would be two characters each in JSON
    leader, other = group.nodes["h0"], group.nodes["h1"]
    asked = [group.start("h0", "put", f"k{n}", value) for n in range(20)]
    asked += [group.start("h1", "put", f"l{n}", value) for n in range(20)]
    limit = MESSAGE_BYTES + 2 * len(value)
    longest = []
    for _ in range(60):  # each node's messages to the other, one round after another
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
    monkeypatch.setattr(table, "FULL_BYTES", 10_000)
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
    group = Group(3, slow_disks=True)
    group.run(20.0)
    leader, *others = group.nodes.values()
    assert leader.voters == frozenset(), "they change"
    assert group.do("h1", "put", "k", b"v") is None
    assert all(r.host.until > group.now for r in group.nodes.values())
    group.wrote("h1", "h2")
    group.run(1.0)
    assert leader.voters == frozenset(), "h0 is alone a quorum of those before"
    group.wrote("h0")
    group.run(0.0)
    assert leader.voters == {"h0", "h1", "h2"}
    group.run(1.0)
    assert others[1].voters == {"h0", "h1", "h2"}
