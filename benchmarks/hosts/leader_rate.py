"""The rate of the leader: real nodes, real encoding, no sockets; only its own work is timed."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable

from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.replicated.messages import decode, encode
from outlast.coordination.replicated.node import Node
from outlast.coordination.replicated.operations import Operation
from outlast.coordination.replicated.quorum import Configuration, Timing

__all__ = ["measure"]

_LEADER = "h0"


class _Group:
    """Nodes whose messages all arrive at once; `work` sums the CPU seconds of the leader."""

    def __init__(self, hosts: int) -> None:
        self.now, self.work, self.received = 0.0, 0.0, 0
        self.names = [f"h{n}" for n in range(hosts)]
        founding = Configuration(frozenset({_LEADER}))
        self.nodes = {
            name: Node(
                name,
                Timing(),
                random.Random(0),
                founding=founding if name == _LEADER else None,
            )
            for name in self.names
        }
        self._disks: dict[str, object] = {}
        self.results: dict[str, int] = dict.fromkeys(self.names, 0)
        for name in self.names:
            self.nodes[_LEADER].add_host(HostInfo(name), self.now)
        for _ in range(40):
            self.pass_time(0.25)

    def pass_time(self, seconds: float) -> None:
        """Lets time pass, as far as messages are answered."""
        self.now += seconds
        for node in self.nodes.values():
            node.tick(self.now)
        self.settle()

    def settle(self) -> None:
        """Passes messages until there are none."""
        while self._exchange():
            pass

    def _exchange(self) -> bool:
        lines: list[tuple[str, str, bytes]] = []
        for name, node in self.nodes.items():
            begun = time.thread_time()
            said = [(name, to, encode(message)) for to, message in node.outbox()]
            if name == _LEADER:
                self.work += time.thread_time() - begun
            lines += said
            if (found := node.configurations) != self._disks.get(name):
                self._disks[name] = found
                node.wrote(found)
            self.results[name] += len(node.results())
        for sender, to, line in lines:
            node = self.nodes[to]
            begun = time.thread_time()
            node.receive(sender, decode(line), self.now)
            if to == _LEADER:
                self.work += time.thread_time() - begun
                self.received += 1
        return bool(lines)


def measure(hosts: int = 64, rounds: int = 20) -> dict[str, float]:
    """Seconds of the leader's work for a message with one operation, and for its answer, by kind;
    and for receiving and sending a message through the kernel.
    """
    group = _Group(hosts)
    kinds: dict[str, Callable[[str, int], Operation]] = {
        "a read": lambda host, n: Operation("read", "k"),
        "a write": lambda host, n: Operation("append", f"log/{n}", host.encode() * 40),
        "a batch of 8 reads": lambda host, n: Operation(
            "batch", operations=tuple(Operation("read", f"k{i}") for i in range(8))
        ),
    }
    measured = {}
    for kind, make in kinds.items():
        group.work = 0.0
        for number in range(rounds):
            for name in group.names[1:]:
                group.nodes[name].submit(make(name, number), group.now)
            group.settle()
        measured[kind] = group.work / (rounds * (hosts - 1))
    measured["a wait"] = _waits(group, rounds, "awaited")
    for name in group.names:
        group.nodes[name].submit(Operation("put", f"w/read-lease/{name}", b"1"), group.now)
    group.settle()
    for _ in range(4):
        group.pass_time(0.25)
    # Of a wait for a key that is covered by the read leases of all hosts.
    measured["a recall"] = _waits(group, rounds, "w/over") - measured["a wait"]
    measured["the kernel"] = _kernel()
    return measured


def _waits(group: _Group, rounds: int, key: str) -> float:
    """Of a wait and of the answer that ends it: all hosts wait for one key."""
    group.work = 0.0
    waiting = group.names[1:]
    for number in range(rounds):
        for name in waiting:
            group.nodes[name].submit(Operation("wait_for", f"{key}/{number}"), group.now)
        group.settle()
        before = dict(group.results)
        group.nodes[waiting[0]].submit(Operation("claim", f"{key}/{number}", b"1"), group.now)
        group.settle()
        assert all(group.results[name] > before[name] for name in waiting)
    return group.work / (rounds * len(waiting))


def _kernel(messages: int = 2000) -> float:
    one, other = socket.socketpair()
    with one, other:
        line = b"x" * 200
        seconds = 0.0
        for _ in range(messages):
            other.send(line)
            begun = time.thread_time()
            one.recv(65536)
            one.send(line)
            seconds += time.thread_time() - begun
            other.recv(65536)
    return seconds / messages
