"""Runs launchers that found, join and leave groups, from one seed.

What must hold at all times:

* no two groups hold valid leases at one time: a host neither steps nor commits without;
* an endpoint gives no second grant while the first may still be used: by its candidate, or by the
  group that this has founded;
* once the network has healed, the launchers are in one group within `BOUND_S`, unless voters of a
  group that may still act are on a host that stays away: then all that wait name one of them.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outlast.coordination.replicated.quorum import Timing
from outlast.launch.hosts.replicated.endpoints import Endpoint
from outlast.launch.hosts.replicated.messages import Grant, Message
from outlast.launch.hosts.replicated.past import Past
from simulation.hosts.schedule import VariedTiming
from simulation.hosts.simulated_launcher import SimulatedLauncher
from simulation.hosts.world import HostClock, World

BOUND_LEASES = 12
"""Silence, founding and joining again, each at most twice; with the first 10 s for retries."""


@dataclass(frozen=True)
class FoundingSchedule:
    """What may happen.

    Attributes:
        away: how many hosts stay away at the end.
        aimed: the chance of a fault at each grant, founding, and admission.
        power_fails: the chance that the power fails before or after a record is written.
        full_disks: the chance that a record cannot be written.
        slow_disks: the chance that a host in a group waits for its record, for up to three leases.
    """

    hosts: int = 5
    endpoints: int = 3
    kills: int = 1
    power_losses: int = 1
    cuts: int = 2
    away: int = 0
    aimed: float = 0.0
    power_fails: float = 0.0
    slow_disks: float = 0.0
    full_disks: float = 0.0
    loss: float = 0.0
    repeats: float = 0.0
    delays: float = 0.0
    latency_s: float = 0.01
    faults_s: float = 10.0
    timing: Timing = dataclasses.field(default_factory=VariedTiming)

    @classmethod
    def of(cls, seed: int) -> FoundingSchedule:
        """The schedule of a seed; all seeds together cover the options."""
        r = random.Random(f"founding {seed}")
        hosts = r.choice([1, 2, 3, 3, 4, 5, 5, 5, 6])
        latency_s = r.choice([0.001, 0.02, 0.1])
        timing = VariedTiming.of(random.Random(f"timing {seed}"), latency_s)
        return cls(
            hosts=hosts,
            endpoints=min(hosts, r.choice([1, 2, 3, 3, 3, 4, 5])),
            kills=r.choice([0, 1, 2, 4]),
            power_losses=r.choice([0, 0, 1, 3]),
            cuts=r.choice([0, 1, 2, 4]),
            away=r.choice([0, 0, 1, 2]),
            aimed=r.choice([0, 0.02, 0.1, 0.3]),
            power_fails=r.choice([0, 0, 0.01, 0.05]),
            full_disks=random.Random(f"full {seed}").choice([0, 0, 0, 0.1]),
            slow_disks=random.Random(f"disks {seed}").choice([0, 0, 0.1, 0.5]),
            loss=r.choice([0, 0, 0.05, 0.2]),
            repeats=r.choice([0, 0, 0.1]),
            delays=r.choice([0, 0, 0.05, 0.2]),
            latency_s=latency_s,
            faults_s=r.choice([3.0, 8.0, 16.0]),
            timing=dataclasses.replace(timing, lease=r.choice([1.5, 2.5, 5.0])),
        )


@dataclass(frozen=True)
class FoundingResult:
    """What happened; `sometimes` counts rare branches: over many seeds, none may be 0."""

    groups: int
    together: bool
    sometimes: dict[str, int]
    events: int


class Machine(HostClock):
    """A host: its address, its clock, its disk, and the launcher that runs on it."""

    def __init__(self, world: FoundingSimulation, index: int, folder: str) -> None:
        self.world = world
        self.name = f"m{index}"
        self.address = f"10.0.0.{index + 1}"
        self.own = index if index < world.schedule.endpoints else -1
        self.disk = f"{folder}/{index}.json"
        self.powered = True
        self.disk_full = False
        self.launcher: SimulatedLauncher | None = None
        super().__init__(world.random, 0.92, 0.18)  # at most 1 + margin between any two

    def start(self) -> None:
        """Starts a launcher unless one runs, or the host has no power."""
        if self.launcher is None and self.powered:
            self.launcher = self.world.new_launcher(self)
            self.launcher.launch()

    def boot(self) -> None:
        """The power is back."""
        self.powered = True
        self.start()

    def kill(self) -> None:
        """Kills the launcher."""
        if self.launcher is not None:
            self.launcher.stop()

    def power_off(self) -> None:
        """Nothing of it remains but the disk."""
        self.powered = False
        self.kill()
        self.world.later(self.boot, 6.0)


class FoundingSimulation(World):
    """The machines, and what must hold."""

    def __init__(self, seed: int, schedule: FoundingSchedule, folder: str) -> None:
        super().__init__(seed)
        self.schedule = schedule
        self.timing = schedule.timing
        self.machines = [Machine(self, i, folder) for i in range(schedule.hosts)]
        self.endpoints = [
            Endpoint(m.address, 29400, (m.address, 29400)) for m in self.machines if m.own >= 0
        ]
        self.launchers: dict[str, SimulatedLauncher] = {}
        self.groups: set[str] = set()
        self.away: list[Machine] = []
        self._granted: dict[str, dict[str, int]] = {}

    # ------------------------------------------------------------------ the world
    def new_launcher(self, machine: Machine) -> SimulatedLauncher:
        """A launcher with a new id."""
        made = SimulatedLauncher(self, machine, len(self.launchers))
        self.launchers[made.me.id] = made
        return made

    def at_address(self, address: tuple[str, int]) -> Machine:
        """The machine with this address."""
        return next(m for m in self.machines if m.address == address[0])

    def latency(self) -> float:
        """Of one message."""
        r, plan = self.random, self.schedule
        late = 3 * r.random() ** 3 if plan.delays and r.random() < plan.delays else 0.0
        return plan.latency_s * (0.5 + r.random()) + late

    def disk_s(self, machine: Machine) -> float:
        """How long a disk takes to write. The host may have a fault meanwhile."""
        plan, r = self.schedule, self.random
        if not plan.slow_disks or r.random() >= plan.slow_disks:
            return 0.01 * r.random()
        self.sometimes["a slow disk"] += 1
        self._aim(machine)
        return 3 * plan.timing.lease * r.random()

    def disk_is_full(self, machine: Machine) -> bool:
        """Whether a write of a record fails now."""
        plan = self.schedule
        full = machine.disk_full or (plan.full_disks > 0 and self.random.random() < plan.full_disks)
        self.sometimes["a full disk"] += full
        return full

    def later(self, what: object, within_s: float) -> None:
        """Plans an event within a time."""
        assert callable(what)
        self.at(self.now + within_s * self.random.random(), what)

    def power_fails(self) -> bool:
        """Whether the power fails now."""
        plan = self.schedule
        return plan.power_fails > 0 and self.random.random() < plan.power_fails

    # ------------------------------------------------------------------ faults
    def plan_faults(self) -> None:
        """Plans all faults of the schedule."""
        plan = self.schedule
        for what, count in (
            (self._kill, plan.kills),
            (self._lose_power, plan.power_losses),
            (self._cut, plan.cuts),
        ):
            for _ in range(count):
                self.later(what, plan.faults_s)

    def _aim(self, machine: Machine) -> None:
        """A fault of a host at an important moment, or soon after."""
        r = self.random
        if r.random() >= self.schedule.aimed:
            return
        faults: list[Callable[[Machine], None]] = [Machine.kill, Machine.power_off, self._cut]
        what = r.choice(faults)
        within_s = r.choice([0.0, 0.1, 0.6, 2.0])
        self.later(lambda: None if self.healed else what(machine), within_s)
        if r.random() < 0.5:
            self.later(lambda: self._cut(machine), 0.6)
        self.later(machine.start, 5.0)

    def _kill(self) -> None:
        machine = self.random.choice(self.machines)
        machine.kill()
        self.later(machine.start, 5.0)

    def _lose_power(self) -> None:
        count = self.random.randrange(1, len(self.machines) + 1)
        for machine in self.random.sample(self.machines, count):
            if machine.powered:
                machine.power_off()

    def _cut(self, around: Machine | None = None) -> None:
        """A random cut, once or flapping."""
        r = self.random
        first = around or r.choice(self.machines)
        cut = self.random_cut(first.name, [m.name for m in self.machines if m is not first])
        when, lasts = self.now, r.choice([0.5, 2.0, 6.0, 15.0])
        for _ in range(r.choice([1, 1, 4])):
            self.at(when, self._cut_now, cut)
            when += lasts
            self.at(when, self.cut.difference_update, cut)
            when += r.random()

    def _cut_now(self, cut: set[tuple[str, str]]) -> None:
        if not self.healed:
            self.cut |= cut

    healed = False

    def heal(self) -> None:
        """Ends all faults; some hosts stay away."""
        self.healed = True
        self.cut.clear()
        plan = self.schedule
        self.schedule = FoundingSchedule(
            plan.hosts, plan.endpoints, latency_s=plan.latency_s, timing=plan.timing
        )
        self.away = self.random.sample(self.machines, min(plan.away, plan.hosts - 1))
        for machine in self.machines:
            if machine in self.away:
                machine.boot = lambda: None  # type: ignore[method-assign]
                machine.powered = False
                machine.kill()
            else:
                machine.boot()

    # ------------------------------------------------------------------ what must hold
    def saw_lease(self, launcher: SimulatedLauncher) -> None:
        """A host of a group has a lease: no host of another group may."""
        for other in self.launchers.values():
            self.must(
                other.group == launcher.group or other.lease_end <= self.now,
                f"{launcher.me.id} has a lease in the group of {launcher.group}, and "
                f"{other.me.id} in that of {other.group}",
            )

    def sent(self, launcher: SimulatedLauncher, to: str, message: Message) -> None:
        """A launcher sends a message: of grants, the earlier ones must be of no use any more."""
        if not isinstance(message, Grant) or not message.sure:
            return
        self.sometimes["granted"] += 1
        given = self._granted.setdefault(launcher.machine.name, {})
        for host in given:
            if host != to:
                self.must(not self._may_use(host, given[host]), f"{to} and {host} have the grant")
                self.sometimes["granted again"] += 1
        given[to] = message.attempt
        self._aim(launcher.machine)
        self._aim(self.launchers[to].machine)

    def _may_use(self, host: str, attempt: int) -> bool:
        candidate = self.launchers[host]
        if host not in self.groups:
            if candidate.dead or candidate._joining is None:
                return False
            founding = candidate._joining._founding
            return founding is not None and founding.attempt == attempt
        alive = {x.me.id for x in self.launchers.values() if x.group == host and not x.dead}
        for name in alive:
            membership = self.launchers[name]._membership
            assert membership is not None
            known = membership._node.configurations
            if known and all(voters.is_quorum(alive) for _, voters, _ in known):
                return True
        return False

    def entered(self, launcher: SimulatedLauncher) -> None:
        """A launcher is in a group."""
        if launcher.group == launcher.me.id:
            self.groups.add(launcher.group)
            self.sometimes["founded"] += 1
        else:
            self.sometimes["admitted"] += 1
        self._aim(launcher.machine)

    def over(self, launcher: SimulatedLauncher) -> None:
        """The service of a launcher has ended: it begins again, as another host."""
        self.sometimes["service over"] += 1
        if launcher.machine.powered:
            self.later(launcher.machine.start, 1.0)

    def together(self) -> bool:
        """Whether all launchers are in one group, with leases."""
        here = [m.launcher for m in self.machines if m not in self.away]
        groups = {x.group if x is not None and x.lease_end > self.now else "" for x in here}
        return len(groups) == 1 and "" not in groups

    def check_waiting(self) -> None:
        """The launchers that are not together wait for a host that is away, and name it."""
        away = {m.address for m in self.away}
        waiting = [
            m.launcher for m in self.machines if m.launcher is not None and not m.launcher.group
        ]
        known = Past()
        for launcher in waiting:
            known = known.merged(launcher._record.past)
        ends = sum(m.own >= 0 and m not in self.away for m in self.machines)
        if not ends:
            return  # a host cannot even find a group that is there
        for launcher in self.launchers.values():
            # A group whose voters are away waits as well, until its leases are over.
            apart = not launcher.dead and launcher.group
            self.must(not apart, f"not all joined {launcher.me.id} in {apart}; away: {away}")
        if 2 * ends <= len(self.endpoints) and not (
            len(self.endpoints) == 2 and self.machines[0] not in self.away
        ):
            return  # too few endpoints
        names = {a for a, _ in known.waits_for().values()}
        told = "; ".join(x.problem() for x in waiting)
        self.must(bool(names & away), f"{names} are here, {sorted(away)} away; they say: {told}")
        self.must(any(a in told for a in names & away), f"does not say that it waits: {told}")
        self.sometimes["waited for a host that is away"] += 1


def simulate_founding(seed: int, schedule: FoundingSchedule | None = None) -> FoundingResult:
    """Runs one schedule to its end.

    Raises:
        AssertionError: with the seed and the schedule, if an invariant is broken.
    """
    schedule = schedule or FoundingSchedule.of(seed)
    top = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="outlast-founding-", dir=top) as folder:
        sim = FoundingSimulation(seed, schedule, folder)
        try:
            return _run(sim, schedule)
        except Exception as e:
            raise AssertionError(f"{type(e).__name__}: {e}\nseed {seed}: {schedule}") from e
        finally:
            for machine in sim.machines:
                machine.kill()


def _run(sim: FoundingSimulation, schedule: FoundingSchedule) -> FoundingResult:
    for machine in sim.machines:
        sim.later(machine.start, sim.random.choice([0.1, 2.0, 6.0]))
    sim.plan_faults()
    sim.run(schedule.faults_s + 3.0)
    sim.heal()
    limit = sim.now + 10.0 + BOUND_LEASES * schedule.timing.lease
    while not sim.together() and sim.now < limit:
        sim.run(sim.now + 0.5)
    together = sim.together()
    if not together:
        sim.check_waiting()
    return FoundingResult(len(sim.groups), together, dict(sim.sometimes), sim.events)
