"""Runs hosts with a replicated store from one seed.

In every step it checks what must hold:

* at most one leader acts: no two have a valid lease;
* what is committed stays, and is equal on all hosts; the tables are those of a plain model;
* no host is declared lost while its own lease is valid, by its own clock; it never gets one later;
* all operations are linearizable, and each is performed once (`history.check`);
* once the network has healed, and if a quorum lives, every operation is answered.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outlast.coordination.replicated.entries import Change, Removed
from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.replicated.operations import Operation
from outlast.coordination.replicated.quorum import Configuration
from outlast.coordination.replicated.timing import Timing
from outlast.testing.hosts.history import Model, check
from outlast.testing.hosts.schedule import HostSchedule
from outlast.testing.hosts.simulated_host import SimulatedHost
from outlast.testing.hosts.workload import next_operation

HEAL_S = 25.0
ANSWER_S = 15.0


@dataclass(frozen=True)
class HostsResult:
    """What happened in a run, for tests that the schedules are varied."""

    leaders: int
    lost: int
    left: int
    snapshots: int
    answered: int
    failed: int
    progress: bool
    events: int


class HostSimulation:
    """The network, the clocks, and the hosts. Events happen in the order of one true time."""

    def __init__(self, seed: int, schedule: HostSchedule) -> None:
        self.random = random.Random(seed)
        self.schedule = schedule
        self.timing = Timing(lease=5.0)
        self.now = 0.0
        self.hosts: dict[str, SimulatedHost] = {}
        self.committed: list[tuple[int, Change]] = []
        self.model = Model()
        self.cut: set[tuple[str, str]] = set()
        self.leaders: set[tuple[int, str]] = set()
        self.snapshots = 0
        self.events = 0
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0
        self._started = 0

    def at(self, when: float, what: Callable[..., object], *args: Any) -> None:
        """Plans an event."""
        self._count += 1
        heapq.heappush(self._queue, (when, self._count, what, args))

    def run(self, until: float) -> None:
        """Lets all events happen up to a time."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, what, args = heapq.heappop(queue)
            self.events += 1
            what(*args)
        self.now = until

    # ------------------------------------------------------------------ hosts
    def start_host(self, founding: bool = False) -> SimulatedHost:
        """Starts a host with a new id, which then asks to join."""
        name = f"h{self._started}"
        self._started += 1
        configuration = Configuration(frozenset([name])) if founding else None
        host = SimulatedHost(self, name, configuration)
        self.hosts[name] = host
        host.begin()
        self._ask_to_join(host)
        return host

    def _ask_to_join(self, host: SimulatedHost) -> None:
        """The host service repeats this until the host is admitted."""
        if not host.alive or host.replica.refused or host.name in self.model.hosts:
            return
        self.at(self.now + 0.5, self._ask_to_join, host)
        others = [h for h in self.hosts.values() if h.alive and not h.paused]
        other = self.random.choice([*others, host])
        reached = self.hosts.get(other.replica.leader or "", other)
        if (host.name, reached.name) not in self.cut and reached.alive and not reached.paused:
            reached.replica.add_host(HostInfo(host.name), reached.clock(self.now))
            reached.end_round()

    def send(self, sender: str, to: str, message: Any) -> None:
        """Puts a message on the network."""
        r, plan = self.random, self.schedule
        if to not in self.hosts or (sender, to) in self.cut or r.random() < plan.loss:
            return
        delay = plan.latency_s * (0.5 + r.random())
        if plan.delays and r.random() < plan.delays:
            delay += 3 * r.random() ** 3
        self.at(self.now + delay, self.hosts[to].deliver, sender, message)
        if plan.repeats and r.random() < plan.repeats:
            self.at(self.now + delay + 2 * r.random() ** 3, self.hosts[to].deliver, sender, message)

    # ------------------------------------------------------------------ faults
    def plan_faults(self) -> None:
        """Plans all faults of the schedule."""
        plan, r = self.schedule, self.random
        begin = self.now
        for what, count in (
            (self._crash, plan.crashes),
            (self._pause, plan.pauses),
            (self._cut, plan.cuts),
            (self._leave, plan.leaves),
            (self.start_host, plan.joins),
        ):
            for _ in range(count):
                self.at(begin + plan.faults_s * r.random(), what)

    def _some_host(self) -> SimulatedHost | None:
        """A host that works; often the leader."""
        alive = [h for h in self.hosts.values() if h.alive and not h.paused and not h.leaving]
        leaders = [h for h in alive if h.replica.leads]
        if leaders and self.random.random() < 0.5:
            return leaders[0]
        return self.random.choice(alive) if alive else None

    def _crash(self) -> None:
        host = self._some_host()
        if host is not None:
            host.alive = False
            if self.random.random() < 0.5:  # restarted: as another host
                self.at(self.now + 3 * self.random.random(), self.start_host)

    def _pause(self) -> None:
        host = self._some_host()
        if host is not None:
            host.paused = True
            self.at(self.now + self.random.choice([0.5, 2, 4, 10]), host.go_on)

    def _cut(self) -> None:
        r = self.random
        names = [h.name for h in self.hosts.values() if h.alive]
        apart = set(r.sample(names, r.randint(1, max(1, len(names) // 2)))) if names else set()
        way = r.randrange(3)
        cut = set()
        for a in apart:
            for b in [name for name in names if name not in apart]:
                cut |= {(a, b)} if way == 0 else {(b, a)} if way == 1 else {(a, b), (b, a)}
        self.cut |= cut
        self.at(self.now + r.choice([0.5, 2, 5, 12]), self.cut.difference_update, cut)

    def _leave(self) -> None:
        host = self._some_host()
        if host is not None and len(self.hosts) > 1:
            host.leave()

    def heal(self) -> None:
        """Ends all faults of the network."""
        self.cut.clear()
        self.schedule = HostSchedule(latency_s=self.schedule.latency_s)
        for host in self.hosts.values():
            host.go_on()

    # ------------------------------------------------------------------ what must hold
    def must(self, holds: bool, what: str) -> None:
        """Ends the run if an invariant is broken."""
        assert holds, f"{what} (at {self.now:.3f} s)"

    def saw_leader(self, host: SimulatedHost, term: int) -> None:
        """A leader acts: no other may."""
        self.leaders.add((term, host.name))
        for other in self.hosts.values():
            self.must(
                other is host or other.acts_until <= self.now,
                f"{host.name} and {other.name} both act as leaders",
            )

    def saw_committed(self, index: int, term: int, change: Change) -> None:
        """A host has performed an entry: it must be that which all others perform."""
        if index <= len(self.committed):
            before = self.committed[index - 1]
            self.must(before == (term, change), f"entry {index} is {change}, and was {before}")
            return
        self.must(index == len(self.committed) + 1, f"entry {index} follows {len(self.committed)}")
        self.committed.append((term, change))
        self.model.perform(change)
        if isinstance(change, Removed) and not change.orderly and change.host in self.hosts:
            lost = self.hosts[change.host]
            self.must(
                not lost.alive or lost.lease_end() <= self.now,
                f"{lost.name} is lost, and has a lease until {lost.lease_end():.3f} s",
            )

    def quorum_lives(self) -> bool:
        """Whether the hosts that are left can go on, by every configuration that they know."""
        left = {h.name for h in self.hosts.values() if h.alive and h.name not in self.model.gone}
        known = [self.hosts[name].replica._voter.log.voters for name in left]
        known = [voters for voters in known if voters is not None]
        return bool(known) and all(voters.is_quorum(left) for voters in known if voters)


def simulate_hosts(seed: int, schedule: HostSchedule | None = None) -> HostsResult:
    """Runs one schedule to its end.

    Raises:
        AssertionError: with the seed and the schedule, if an invariant is broken.
    """
    schedule = schedule or HostSchedule.of(seed)
    sim = HostSimulation(seed, schedule)
    try:
        return _run(sim, schedule)
    except Exception as e:
        raise AssertionError(f"{type(e).__name__}: {e}\nseed {seed}: {schedule}") from e


def _run(sim: HostSimulation, schedule: HostSchedule) -> HostsResult:
    sim.start_host(founding=True)
    for _ in range(schedule.hosts - 1):
        sim.at(sim.now + sim.random.random(), sim.start_host)
    sim.run(1.0 + sim.random.random())
    sim.plan_faults()
    sim.run(sim.now + schedule.faults_s + 3.0)
    sim.heal()
    progress = sim.quorum_lives()
    sim.run(sim.now + HEAL_S)
    if progress:
        _check_progress(sim)
    calls = [call for host in sim.hosts.values() for call in host.calls]
    broken = check(calls, sim.model)
    sim.must(not broken, "; ".join(broken[:3]))
    for host in sim.hosts.values():
        if host.replica._voter.applied == len(sim.committed):
            keys = host.replica._voter.table.keys
            sim.must(keys == sim.model.keys, f"the table of {host.name}: {keys}")
    return HostsResult(
        leaders=len(sim.leaders),
        lost=sum(b'orderly": false' in line for line in _lost(sim)),
        left=sum(b'orderly": true' in line for line in _lost(sim)),
        snapshots=sim.snapshots,
        answered=sum(call.end < float("inf") for call in calls),
        failed=sum(call.failed for call in calls),
        progress=progress,
        events=sim.events,
    )


def _lost(sim: HostSimulation) -> list[bytes]:
    return sim.model.keys.get("hosts/lost", b"").splitlines()


def _check_progress(sim: HostSimulation) -> None:
    left = [
        h
        for h in sim.hosts.values()
        if h.alive and not h.leaving and h.name in sim.model.hosts and not h.replica.refused
    ]
    asked = [h.ask(Operation("add", "last", amount=1)) for h in left]
    sim.run(sim.now + ANSWER_S)
    for host, call in zip(left, asked, strict=True):
        sim.must(call.end < float("inf"), f"{host.name} is not answered")
        for earlier in host.calls:
            done = earlier.end < float("inf") or earlier.failed
            waits = earlier.operation.name == "wait_for"
            key = earlier.operation.key
            sim.must(done or (waits and key not in sim.model.keys), f"not answered: {earlier}")
    for host in sim.hosts.values():
        if host.alive and host.leaving:
            sim.must(host.replica.refused is not None, f"{host.name} cannot leave")
    voters = {name for h in left for name in [h.replica._voter.log.voters] if h.replica.leads}
    for configuration in voters:
        assert configuration is not None
        gone = configuration.all & sim.model.gone
        sim.must(not gone, f"lost hosts are still voters: {sorted(gone)}")


__all__ = ["HostSimulation", "HostsResult", "next_operation", "simulate_hosts"]
