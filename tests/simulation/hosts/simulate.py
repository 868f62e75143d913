"""Runs hosts with a replicated store from one seed.

In every step it checks what must hold:

* at most one leader acts: no two have a valid lease;
* what is committed stays, and is equal on all hosts; the tables are those of a plain model;
* no host is declared lost while its own lease is valid, by its own clock; it never gets one later;
* nobody is told of a covered key while a host has a read lease without it;
* all operations are linearizable, and each is performed once (`history.check`);
* once the network has healed, and if a quorum lives, every operation is answered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outlast.coordination.replicated.hosts import HostInfo, HostLost
from outlast.coordination.replicated.messages import Change, decode, encode
from outlast.coordination.replicated.operations import Operation
from outlast.coordination.replicated.quorum import Configuration, Timing
from simulation.hosts.history import FOREVER, Call, Model, check
from simulation.hosts.schedule import HostSchedule
from simulation.hosts.simulated_host import SimulatedHost
from simulation.hosts.world import World

SETTLE_S = 40.0


@dataclass(frozen=True)
class HostsResult:
    """What happened in a run, for tests that the schedules are varied.

    `sometimes` counts messages of rare branches; over many seeds, none may be 0.
    """

    leaders: int
    lost: int
    left: int
    sometimes: dict[str, int]
    answered: int
    failed: int
    progress: bool
    events: int


class HostSimulation(World):
    """The network, the clocks, and the hosts."""

    def __init__(self, seed: int, schedule: HostSchedule) -> None:
        super().__init__(seed)
        self.schedule = schedule
        self.timing: Timing = schedule.timing
        self.hosts: dict[str, SimulatedHost] = {}
        self.committed: list[tuple[int, Change]] = []
        self.model = Model()
        self.leaders: set[tuple[int, str]] = set()
        self._started = 0

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
        if not host.alive or host.node.host.refused or host.name in self.model.hosts:
            return
        self.at(self.now + 0.5, self._ask_to_join, host)
        others = [h for h in self.hosts.values() if h.alive and not h.paused]
        other = self.random.choice([*others, host])
        reached = self.hosts.get(other.node.host.leader or "", other)
        if (host.name, reached.name) not in self.cut and reached.alive and not reached.paused:
            reached.node.add_host(HostInfo(host.name), reached.clock(self.now))
            reached.end_round()

    def send(self, sender: str, to: str, message: Any) -> None:
        """Puts a message on the network."""
        r, plan = self.random, self.schedule
        if to not in self.hosts or (sender, to) in self.cut or r.random() < plan.loss:
            return
        message = decode(encode(message))
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
        leaders = [h for h in alive if h.node.leads]
        if leaders and self.random.random() < 0.6:
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
            self.at(self.now + self.random.choice([0.5, 2, 2.5, 3, 4, 10]), host.go_on)

    def _cut(self) -> None:
        host = self._some_host()
        if host is None:
            return
        others = [h.name for h in self.hosts.values() if h.alive and h is not host]
        cut = self.random_cut(host.name, others)
        self.cut |= cut
        self.at(self.now + self.random.choice([0.5, 2, 5, 12]), self.cut.difference_update, cut)

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
        if isinstance(change, HostLost) and not change.left and change.host in self.hosts:
            lost = self.hosts[change.host]
            self.must(
                not lost.alive or lost.lease_end() <= self.now,
                f"{lost.name} is lost, and has a lease until {lost.lease_end():.3f} s",
            )

    def saw_answer(self, call: Call) -> None:
        """A host is told of a covered key: no other may have a read lease that does not count it,
        as its ranks see it, whether its service runs or is stopped. One that leaves has no ranks.
        """
        number = self.model.covered.get(call.operation.key)
        if number is None or call.result is None:
            return
        for host in self.hosts.values():
            covered, until = host.page
            if host.alive and not host.leaving and self.now < host.true(until):
                self.sometimes["read lease"] += 1
                self.must(
                    covered >= number,
                    f"{call.host} is told of {call.operation.key}, and {host.name} has a read "
                    f"lease for {covered} covered keys",
                )

    def quorum_lives(self) -> bool:
        """Whether the hosts that are left can go on, by every configuration that they know."""
        left = {h.name for h in self.hosts.values() if h.alive and h.name not in self.model.gone}
        known = [self.hosts[name].node._voter.log.voters for name in left]
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
    if progress:
        _check_progress(sim)
    else:
        sim.run(sim.now + 3.0)
    calls = [call for host in sim.hosts.values() for call in host.calls]
    broken = check(calls, sim.model)
    sim.must(not broken, "; ".join(broken[:3]))
    tables = [
        host.node._voter.table
        for host in sim.hosts.values()
        if host.node._voter.applied == len(sim.committed)
    ]
    for table in tables:
        sim.must(table.keys == sim.model.keys, f"the keys of a table: {table.keys}")
        sim.must(table.sessions == tables[0].sessions, f"not equal: {table.sessions}")
    removed = [change.left for _, change in sim.committed if isinstance(change, HostLost)]
    return HostsResult(
        leaders=len(sim.leaders),
        lost=len(removed) - sum(removed),
        left=sum(removed),
        sometimes=dict(sim.sometimes),
        answered=sum(call.end < FOREVER for call in calls),
        failed=sum(call.failed for call in calls),
        progress=progress,
        events=sim.events,
    )


def _check_progress(sim: HostSimulation) -> None:
    """With a quorum and a network that works, everything comes to an end, and one more operation of
    each host as well.
    """
    _settle(sim, lambda: _open_ends(sim))
    asked = [host.ask(Operation("add", "last", amount=1)) for host in _members(sim)]
    _settle(sim, lambda: [f"not answered: {call}" for call in asked if not call.is_over])


def _settle(sim: HostSimulation, open_ends: Callable[[], list[str]]) -> None:
    end = sim.now + SETTLE_S
    while open_ends():
        sim.must(sim.now < end, "; ".join(open_ends()[:3]))
        sim.run(sim.now + 0.5)


def _members(sim: HostSimulation) -> list[SimulatedHost]:
    """The hosts that are in the job, and stay."""
    return [
        host
        for host in sim.hosts.values()
        if host.alive and not host.leaving and host.name in sim.model.hosts
    ]


def _open_ends(sim: HostSimulation) -> list[str]:
    members = _members(sim)
    leaders = [host.node for host in members if host.node.leads]
    if not members:
        return []
    if len(leaders) != 1:
        return ["no host leads"]
    voters = leaders[0]._voter.log.voters
    assert voters is not None
    found = [f"{name} is a voter still" for name in voters.all & sim.model.gone]
    for host in sim.hosts.values():
        if not host.alive and host.name in sim.model.hosts:
            found.append(f"{host.name} is not declared lost")
        elif host.leaving and host.name in sim.model.hosts:
            found.append(f"{host.name} has not left")
    for host in members:
        found += [
            f"not answered: {call}"
            for call in host.calls
            if not call.is_over
            and (call.operation.name != "wait_for" or call.operation.key in sim.model.keys)
        ]
    return found
