"""Random faults of hosts and their network, by seed: planned as a whole, before the first begins.

Kinds: `kill` (the agent is killed and started again), `power` (the host is off for a while), cuts
that are `half`, `one-way`, `partial` (one pair) or `flapping`, `pause` (the agent is stopped),
`freeze` (the whole host is), and `shake` (delay, loss and repetition of packets); in a job also
`drain` (the host is asked to leave, and joins again). They overlap.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from network import Network

from .shaker import Shaker

KINDS = ("kill", "power", "half", "one-way", "partial", "flapping", "pause", "freeze", "shake")


class Agents(Protocol):
    """The agents of a trial, each of them on a host."""

    def start(self, host: str) -> None:
        """Starts the agent of a host that has none."""

    def kill(self, host: str) -> None:
        """Kills the agent of a host."""

    def pause(self, host: str) -> None:
        """Stops the agent of a host."""

    def resume(self, host: str) -> None:
        """Continues it."""

    def drain(self, host: str) -> None:
        """Has a host leave in order."""

    def join_again(self, host: str) -> None:
        """Starts the agent of a host that has left."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault: from `begin` to `end`, in seconds of the trial."""

    kind: str
    begin: float
    end: float
    hosts: tuple[str, ...]
    others: tuple[str, ...] = ()


def plan(
    r: random.Random,
    names: Iterable[str],
    seconds: float,
    lease_s: float,
    known: Sequence[str] = KINDS,
) -> list[Fault]:
    """The faults of a trial. Each trial has a few kinds, so that some have few at once."""
    names = sorted(names)
    kinds = r.sample(known, r.randint(2, 5))
    pause_s = r.choice([0.6, 1.2, 2.4]) * lease_s  # on average, between the begins of two
    found, at = [], 0.0
    while (at := at + 2 * pause_s * r.random()) < seconds:
        kind = r.choice(kinds)
        some = r.sample(names, r.randint(1, len(names) - 1))
        one = kind in ("kill", "power", "pause", "freeze", "partial", "drain")
        hosts = tuple(sorted(some[:1] if one else some))
        left = [name for name in names if name not in hosts]
        others = tuple(left[:1] if kind == "partial" else left)
        end = at + lease_s * r.choice([0.2, 0.5, 1.0, 1.5, 2.5]) * (0.5 + r.random())
        found.append(Fault(kind, at, end, hosts, others))
    return found


class Faults:
    """Makes planned faults happen, and ends them."""

    def __init__(
        self, network: Network, shaker: Shaker | None, agents: Agents, r: random.Random
    ) -> None:
        self._network, self._shaker, self._agents, self._r = network, shaker, agents, r
        self._cuts: Counter[tuple[str, str]] = Counter()
        self._stopped: Counter[str] = Counter()
        self._down: Counter[str] = Counter()
        self._shaken: list[tuple[str, str]] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def run(self, planned: list[Fault], seconds: float) -> None:
        """Makes the faults, for as long; what has not ended then goes on until `end_all`."""
        begin = time.monotonic()
        for fault in planned:
            self._at(fault.begin, lambda fault=fault: self._begin(fault))
        while self._due and self._due[0][0] < seconds:
            at, _, work = heapq.heappop(self._due)
            time.sleep(max(0.0, begin + at - time.monotonic()))
            work()
        time.sleep(max(0.0, begin + seconds - time.monotonic()))
        self._due.clear()

    def isolate_all(self) -> None:
        """Cuts each host off from all others."""
        for one in self._network.names:
            for other in self._network.names:
                if one != other:
                    self._network.cut(one, other)

    def end_all(self, core: Iterable[str]) -> None:
        """Ends all faults of these hosts, and the cuts between them; of other hosts, none."""
        core = sorted(core)
        if self._shaker is not None:
            self._shaker.shake((), 0, 0, 0)
        for one in core:
            for other in core:
                self._network.mend(one, other)
        for host in core:
            if self._stopped.pop(host, 0) and self._network[host].on:
                self._network[host].thaw()
                self._agents.resume(host)
            if self._down.pop(host, 0):
                self._start(host)
            self._agents.join_again(host)

    # ------------------------------------------------------------------ one fault

    def _at(self, at: float, work: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._due, (at, self._number, work))

    def _begin(self, fault: Fault) -> None:
        both = [(a, b) for a in fault.hosts for b in fault.others]
        if fault.kind != "one-way":
            both += [(b, a) for a, b in both]
        (host, *_) = fault.hosts
        if fault.kind in ("half", "one-way", "partial"):
            self._cut(both)
            self._at(fault.end, lambda: self._mend(both))
        elif fault.kind == "flapping":
            at, step_s = fault.begin, max(0.05, (fault.end - fault.begin) / 8)
            while at < fault.end:
                self._at(at, lambda: self._cut(both))
                at += 2 * step_s * self._r.random()
                self._at(at, lambda: self._mend(both))
                at += 2 * step_s * self._r.random()
        elif fault.kind == "shake" and self._shaker is not None:
            self._shaken = both
            self._shaker.shake(both, 0.15 * self._r.random(), 0.3 * self._r.random(), 0.1)
            self._at(fault.end, lambda: self._calm(both))
        elif fault.kind in ("kill", "power") and not self._down[host]:
            self._down[host] += 1
            self._stopped.pop(host, None)
            if fault.kind == "kill":
                self._agents.kill(host)
            else:
                self._network[host].power_off()
            self._at(fault.end, lambda: self._back(host))
        elif fault.kind == "drain" and not self._down[host] + self._stopped[host]:
            self._agents.drain(host)
            self._at(fault.end, lambda: self._agents.join_again(host))
        elif fault.kind in ("pause", "freeze") and not self._down[host] + self._stopped[host]:
            self._stopped[host] += 1
            stop = self._agents.pause if fault.kind == "pause" else self._freeze
            stop(host)
            self._at(fault.end, lambda: self._go_on(host))

    def _freeze(self, host: str) -> None:
        self._network[host].freeze()

    def _go_on(self, host: str) -> None:
        if self._stopped.pop(host, 0):
            self._network[host].thaw()
            self._agents.resume(host)

    def _back(self, host: str) -> None:
        if self._down.pop(host, 0):
            self._start(host)

    def _start(self, host: str) -> None:
        if not self._network[host].on:
            self._network.boot(host)
        self._agents.start(host)

    def _cut(self, directions: list[tuple[str, str]]) -> None:
        for direction in directions:
            self._cuts[direction] += 1
            self._network.cut(*direction)

    def _mend(self, directions: list[tuple[str, str]]) -> None:
        for direction in directions:
            self._cuts[direction] -= 1
            if self._cuts[direction] <= 0:
                self._network.mend(*direction)

    def _calm(self, directions: list[tuple[str, str]]) -> None:
        if self._shaker is not None and self._shaken == directions:
            self._shaker.shake((), 0, 0, 0)
