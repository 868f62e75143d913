"""The whole membership protocol under deterministic simulation.

The real state machine (`machine.py`) and the real protocol run for N members in one process. The
seed picks every interleaving, every death (of a main process between any two store operations, of
its monitor while it reports), every fault, newcomer and delay. After each step R1 and R2 are
checked; R5 is that every run ends. A failure names its seed: `simulate(seed)` replays it.
"""

from __future__ import annotations

import dataclasses
import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from outlast.clock import Clock
from outlast.coordination.ops import Link, Op, _perform
from outlast.coordination.protocol import Job
from outlast.coordination.records import FaultRecord
from outlast.coordination.simulation import Simulation, Task
from outlast.coordination.view import ViewRecord
from outlast.errors import RankDiscarded, RestartAbort, RestartError
from outlast.inprocess.contract import (
    GrowPolicy,
    Interrupted,
    Limits,
    Phase,
    Place,
    Raised,
    Returned,
)
from outlast.inprocess.machine import Machine

__all__ = ["Result", "Schedule", "simulate"]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a seed may do. Probabilities are per step of the simulation, budgets per run."""

    members: int = 4
    deaths: int = 3
    faults: int = 4
    joins: int = 3
    leaves: int = 1
    aborts: int = 0
    double_deaths: int = 1
    p_death: float = 0.01
    grow: GrowPolicy = GrowPolicy.AT_ONCE
    divisor: int = 1
    reserve: int = 0
    await_full: bool = False

    @classmethod
    def of(cls, seed: int) -> Schedule:
        """A schedule that covers the options, by seed."""
        r = random.Random(f"schedule {seed}")
        return cls(
            members=r.randint(1, 6),
            deaths=r.randint(0, 4),
            faults=r.randint(0, 4),
            joins=r.randint(0, 4),
            leaves=r.randint(0, 2),
            aborts=int(r.random() < 0.1),
            double_deaths=r.randint(0, 2),
            p_death=r.choice([0.002, 0.01, 0.05]),
            grow=r.choice(list(GrowPolicy)),
            divisor=r.choice([1, 1, 1, 2]),
            reserve=r.choice([0, 0, 1]),
            await_full=r.random() < 0.2,
        )


@dataclasses.dataclass
class Result:
    """How a run ended: by member name, what it returned or raised; and what it took."""

    returned: dict[str, Any]
    raised: dict[str, BaseException]
    iterations: int
    steps: int
    seconds: float


class _Host:
    """The rank-local side of a simulated member; its function is an operation that the
    scheduler ends as it likes.
    """

    def __init__(self, world: _World, name: str, rank: int) -> None:
        self.world, self.name = world, name
        self.clock: Clock = world.sim.clock
        self.token = name
        self.preferred_rank = rank
        self.grow = world.schedule.grow
        size = world.schedule.members if world.schedule.await_full else 0
        self.limits = Limits(120.0, 120.0, await_size=size, await_seconds=1.0)
        self.iteration, self.member = -1, -1
        self.place: Place | None = None
        self.in_function = False

    def at(self, phase: Phase, iteration: int, member: int) -> None:
        self.iteration, self.member = iteration, member
        if phase is Phase.RUN:
            self.world.entered(self)

    def assign(self, record: ViewRecord, member: int) -> Place:
        self.world.maybe_fail(self, "assign")
        alive = [m for m in record.slots() if m is not None]
        size = len(alive) - len(alive) % self.world.schedule.divisor
        rank = alive.index(member)
        if size and rank >= size:
            raise RankDiscarded(self.name)
        size = size or len(alive)
        active = max(1, size - self.world.schedule.reserve)
        self.place = Place(rank, size, rank < active)
        return self.place

    async def publish(self, link: Link, iteration: int) -> None:
        self.world.maybe_fail(self, "publish")

    async def initialize(self, link: Link, iteration: int) -> FaultRecord | None:
        if self.world.spend("faults", 0.05):
            return self.fault(iteration, "EXCEPTION", "initialize")
        return None

    async def call(self, iteration: int) -> Returned | Raised | Interrupted:
        self.in_function = True
        try:
            outcome = await _perform(Op("function", f"over/{iteration}"))
        finally:
            self.in_function = False
        if isinstance(outcome, BaseException):
            raise outcome
        if outcome == "raise":
            return Raised(self.fault(iteration, "EXCEPTION", "function"))
        return Interrupted() if outcome == "interrupt" else Returned(self.name)

    async def wait_over(self, link: Link, iteration: int, timeout: float | None) -> bytes:
        return await link.wait_for(f"over/{iteration}", timeout)

    async def settle(self, iteration: int) -> None:
        self.world.maybe_fail(self, "finalize")

    def fault(self, iteration: int, interruption: str, cause: str) -> FaultRecord:
        return FaultRecord(
            iteration, self.member, self.preferred_rank, "sim", 0, interruption, cause
        )

    def fault_of(self, iteration: int, error: BaseException) -> FaultRecord:
        return self.fault(iteration, "BASE_EXCEPTION", repr(error))

    def timing(self, name: str) -> AbstractContextManager[object]:
        return nullcontext()

    def restarting(self, cause: FaultRecord | None, faults: list[FaultRecord]) -> None:
        pass


class _World:
    def __init__(self, seed: int, schedule: Schedule) -> None:
        self.schedule = schedule
        self.budget = dataclasses.asdict(schedule)
        self.sim = Simulation(seed, self._function)
        self.hosts: dict[Task, _Host] = {}
        self.reporters: dict[Task, _Host] = {}
        self.result = Result({}, {}, 0, 0, 0.0)
        self.places: dict[int, dict[int, int]] = {}
        self.sizes: dict[int, int] = {}
        self.born = 0
        for rank in range(schedule.members):
            self.start(rank)

    # -- what may happen ---------------------------------------------------------------------

    def start(self, rank: int) -> None:
        """A new process, started as `rank`."""
        self.born += 1
        host = _Host(self, f"p{self.born}", rank)
        machine = Machine(host, Link(), self.schedule.members)
        slow = self.sim.random.choice([1, 1, 1, 10])
        task = Task(host.name, machine.run(), slow=slow, on_end=self._ended)
        self.hosts[task] = host
        self.sim.tasks.append(task)
        self.sim._resume(task, None, None)

    def spend(self, what: str, probability: float) -> bool:
        """Whether one of a budget is spent now."""
        if self.budget[what] > 0 and self.sim.random.random() < probability:
            self.budget[what] -= 1
            return True
        return False

    def maybe_fail(self, host: _Host, where: str) -> None:
        if self.spend("leaves", 0.05):
            raise RestartError(f"{host.name} {where}")
        if self.spend("aborts", 0.05):
            raise RestartAbort(f"{host.name} {where}")

    def before_step(self) -> None:
        """Deaths, of main processes and of reporting monitors, and newcomers."""
        alive = list(self.hosts)
        if alive and self.spend("deaths", self.schedule.p_death):
            task = self.sim.random.choice(alive)
            host = self.hosts.pop(task)
            self.sim.kill(task)
            host.in_function = False
            self.report(host)
            if self.spend("joins", 0.7):
                self.start(host.preferred_rank)
        elif self.reporters and self.spend("double_deaths", 0.05):
            task = self.sim.random.choice(list(self.reporters))
            host = self.reporters.pop(task)
            self.sim.kill(task)
            self.report(host)  # an observer of its heartbeat takes over
        elif alive and self.spend("joins", 0.002):
            self.start(self.sim.random.randrange(self.schedule.members + 1))

    def report(self, host: _Host) -> None:
        """The monitor of a dead member tells the others."""
        task = Task(f"monitor of {host.name}", self._report(host), on_end=self._ended)
        self.reporters[task] = host
        self.sim.tasks.append(task)
        self.sim._resume(task, None, None)

    async def _report(self, host: _Host) -> None:
        job = Job(Link(), self.schedule.members)
        fault = host.fault(host.iteration, "TERMINATED", "killed")
        await job.report_killed(host.preferred_rank, host.token, host.member, fault)

    def _function(self, task: Task, op: Op) -> Any:
        assert op.name == "function"
        over = self.sim.store.table.get(op.key)

        def end() -> Any:
            if over is not None:
                return self.sim.random.choice(["interrupt", "interrupt", "raise", "return"])
            if self.spend("faults", 0.5):
                return "raise"
            if self.spend("leaves", 0.2):
                return SystemExit(3)
            return "return"

        return end

    # -- what must hold ----------------------------------------------------------------------

    def entered(self, host: _Host) -> None:
        k, place = host.iteration, host.place
        assert place is not None
        for other in self.hosts.values():
            assert not (other.in_function and other.iteration < k), (
                f"R2: {host.name} enters {k} while {other.name} is in {other.iteration}"
            )
        taken = self.places.setdefault(k, {})
        assert place.rank not in taken, f"R1: two members at rank {place.rank} of {k}"
        taken[place.rank] = host.member
        size = self.sizes.setdefault(k, place.world_size)
        assert size == place.world_size, f"R1: world sizes {size}, {place.world_size} in {k}"
        assert place.rank < size, f"R1: rank {place.rank} of {size}"
        self.result.iterations = max(self.result.iterations, k + 1)

    def _ended(self, task: Task) -> None:
        self.reporters.pop(task, None)
        if self.hosts.pop(task, None) is None:
            if task.error is not None:
                raise AssertionError(f"{task.name}: {task.error!r}") from task.error
        elif task.error is None:
            self.result.returned[task.name] = task.value
        else:
            self.result.raised[task.name] = task.error


def simulate(seed: int, schedule: Schedule | None = None) -> Result:
    """Runs one schedule to its end.

    Raises:
        AssertionError: if an invariant does not hold, or the run does not end. The message ends
            with the seed and the last steps.
    """
    world = _World(seed, schedule or Schedule.of(seed))
    sim = world.sim
    try:
        sim.run(each=world.before_step)
        wrong = {n: e for n, e in world.result.raised.items() if not _allowed(e)}
        assert not wrong, f"R5: {wrong}"
        assert sim.clock.now() < 120.0, f"R5: a timeout was needed: {sim.clock.now()} s"
    except AssertionError as e:
        tail = "\n".join(sim.trace[-60:])
        raise AssertionError(f"{e}\nseed {seed}: {world.schedule}\n{tail}") from e
    world.result.steps, world.result.seconds = sim.steps, sim.clock.now()
    return world.result


def _allowed(error: BaseException) -> bool:
    return isinstance(error, RestartError | RestartAbort | SystemExit) and not isinstance(
        error, TimeoutError
    )
