"""The whole membership protocol under deterministic simulation.

The real state machine (`machine.py`) and the real protocol run for N members in one process. The
seed picks every interleaving, every death (of a main process between any two store operations, of
its monitor while it reports), every fault, newcomer and delay, and live members that are taken for
lost. A failure names its seed: `simulate(seed)` replays it. What is checked:

* R1 whoever enters k finds ranks dense from 0 and one world size; no live member is left out, nor
  is one who asked in time; nobody is in who was known to be lost.
* R2 nobody decides what follows k, or enters k+1, while a live member is in k, `initialize` and
  `finalize` included.
* R5 every run ends, without the help of any backstop or timeout, and each member with a value or
  with the error that it was given. Values are returned only if all of the view have finished.
"""

from __future__ import annotations

import dataclasses
import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from outlast.clock import Clock
from outlast.coordination import barrier
from outlast.coordination.ops import Link, Op, _perform
from outlast.coordination.protocol import COMPLETED, Job
from outlast.coordination.records import FaultRecord, LostRecord, lines
from outlast.coordination.simulation import Simulation, Task
from outlast.coordination.view import ViewRecord
from outlast.errors import RankDiscarded, RankLostError, RestartAbort, RestartError
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

# How long a restart is held for replacements, where it is. Shorter than the backstop of those that
# wait: a hold that nobody ends, since who was to end it died, is over by itself first.
_HOLD = 0.5


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a seed may do. Probabilities are per step of the simulation, budgets per run.

    Attributes:
        members: how many start.
        deaths, double_deaths: of main processes, and of monitors while they report one.
        suspicions: live members that are taken for lost.
        faults, leaves, aborts: exceptions that restart, that end a member, that end the job.
        joins: new processes, mostly in the place of a dead one.
        p_death: of a death, in each step.
        grow, divisor, reserve, await_full: the policies.
    """

    members: int = 4
    deaths: int = 3
    faults: int = 4
    joins: int = 3
    leaves: int = 1
    aborts: int = 0
    double_deaths: int = 1
    suspicions: int = 0
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
            suspicions=r.choice([0, 0, 0, 1, 2]),
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
        self.limits = Limits(120.0, 120.0, await_size=size, await_seconds=_HOLD)
        self.machine = _Machine(self, Link(), world.schedule.members)
        self.iteration, self.member = -1, -1
        self.place: Place | None = None
        self.inside = False
        self.leaving = False
        self.given: BaseException | None = None

    async def live(self) -> Any:
        """The member's life, as the session has it."""
        value = await self.machine.run()
        await self.machine.job.say_goodbye(self.member, self.iteration)
        return value

    def at(self, phase: Phase, iteration: int, member: int) -> None:
        self.iteration, self.member = iteration, member
        if phase is Phase.INITIALIZE:
            self.world.started(self)
            self.inside = True
        elif phase is Phase.DECIDE:
            self.world.deciding(iteration)
        elif phase is Phase.DONE:
            self.inside = False

    def assign(self, record: ViewRecord, member: int) -> Place:
        self.iteration = record.iteration
        self.world.decided(record)
        self.maybe_leave("assign")
        alive = [m for m in record.slots() if m is not None]
        size = len(alive) - len(alive) % self.world.schedule.divisor
        rank = alive.index(member)
        if size and rank >= size:
            raise self.give(RankDiscarded(self.name))
        size = size or len(alive)
        active = max(1, size - self.world.schedule.reserve)
        self.place = Place(rank, size, rank < active)
        return self.place

    async def publish(self, link: Link, iteration: int) -> None:
        self.maybe_leave("publish")

    async def initialize(self, link: Link, iteration: int) -> FaultRecord | None:
        self.maybe_leave("initialize")
        if self.world.spend("faults", 0.05):
            return self.fault(iteration, "EXCEPTION", "initialize")
        return None

    async def call(self, iteration: int) -> Returned | Raised | Interrupted:
        outcome = await _perform(Op("function", f"over/{iteration}"))
        if isinstance(outcome, BaseException):
            raise self.give(outcome)
        if outcome == "raise":
            return Raised(self.fault(iteration, "EXCEPTION", "function"))
        if outcome == "interrupt":
            return Interrupted()
        self.world.finished.setdefault(iteration, set()).add(self.member)
        return Returned(self.name)

    async def wait_over(self, link: Link, iteration: int, timeout: float | None) -> bytes:
        if self.place is not None and not self.place.active:
            self.world.finished.setdefault(iteration, set()).add(self.member)
        return await link.wait_for(f"over/{iteration}", timeout)

    async def settle(self, iteration: int) -> None:
        self.maybe_leave("finalize")
        self.inside = False

    def testimony(self, iteration: int) -> FaultRecord | None:
        return None

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

    # -- faults ------------------------------------------------------------------------------

    def give(self, error: BaseException) -> BaseException:
        """The error that this member is to end with."""
        self.given = error
        return error

    def maybe_leave(self, where: str) -> None:
        if self.world.spend("leaves", 0.05):
            raise self.give(RestartError(f"{self.name} {where}"))
        if self.world.spend("aborts", 0.05):
            raise self.give(RestartAbort(f"{self.name} {where}"))


class _Machine(Machine):
    async def _leave(self, error: BaseException) -> None:
        assert isinstance(self.host, _Host)
        self.host.leaving, self.host.inside = True, False
        await super()._leave(error)


class _World:
    def __init__(self, seed: int, schedule: Schedule) -> None:
        self.schedule = schedule
        self.budget = dataclasses.asdict(schedule)
        self.sim = Simulation(seed, self._choose)
        self.hosts: dict[Task, _Host] = {}
        self.reporters: dict[Task, _Host] = {}
        self.ended: list[tuple[Task, _Host]] = []
        self.sizes: dict[int, int] = {}
        self.finished: dict[int, set[int]] = {}
        self.known: dict[int, tuple[frozenset[int], list[int]]] = {}
        self.suspected: set[int] = set()
        self.broken: list[str] = []
        self.timeouts_seen = 0
        self.born = 0
        for rank in range(schedule.members):
            self.start(rank)

    # -- what may happen ---------------------------------------------------------------------

    def start(self, rank: int) -> None:
        """A new process, started as `rank`."""
        self.born += 1
        host = _Host(self, f"p{self.born}", rank)
        slow = self.sim.random.choice([1, 1, 1, 10])
        task = Task(host.name, host.live(), slow=slow, on_end=self._ended)
        self.hosts[task] = host
        self.sim.add(task)

    def spend(self, what: str, probability: float) -> bool:
        """Whether one of a budget is spent now."""
        if self.budget[what] > 0 and self.sim.random.random() < probability:
            self.budget[what] -= 1
            return True
        return False

    def before_step(self) -> None:
        """Deaths, of main processes and of reporting monitors, suspicions, and newcomers."""
        self._check_holds()
        assert not self.broken
        if not self.hosts:
            return
        if self.spend("deaths", self.schedule.p_death):
            task = self.sim.random.choice(list(self.hosts))
            host = self.hosts.pop(task)
            self.sim.kill(task)
            self._watch(host, self._monitor(host))
            if self.spend("joins", 0.7):
                self.start(host.preferred_rank)
        elif self.reporters and self.spend("double_deaths", 0.05):
            task = self.sim.random.choice(list(self.reporters))
            host = self.reporters.pop(task)
            self.sim.kill(task)
            self._watch(host, self._observer(host))
        elif self.spend("suspicions", 0.01):
            host = self.sim.random.choice(list(self.hosts.values()))
            self._watch(host, self._observer(host, suspected=True))
        elif self.spend("joins", 0.002):
            self.start(self.sim.random.randrange(self.schedule.members + 1))

    def _watch(self, host: _Host, report: Any) -> None:
        task = Task(f"{report.__name__} of {host.name}", report, on_end=self._ended)
        self.reporters[task] = host
        self.sim.add(task)

    async def _monitor(self, host: _Host) -> None:
        """The monitor of a dead member tells the others."""
        job = Job(Link(), self.schedule.members)
        fault = host.fault(host.iteration, "TERMINATED", "killed")
        await job.report_killed(host.preferred_rank, host.token, host.member, fault)

    async def _observer(self, host: _Host, suspected: bool = False) -> None:
        """The monitor of another member hears no heartbeat of this one any more."""
        member = self._id_of(host)
        at = await _perform(Op("heartbeat", str(member)))
        if at is None or not (suspected or self._is_silent(member)):
            return
        self.suspected.add(member)
        fault = host.fault(at, "UNRESPONSIVE", "not heard of")
        job = Job(Link(), self.schedule.members)
        await job.report_lost(LostRecord(member, fault.cause), at, fault)

    def _id_of(self, host: _Host) -> int:
        """The member that `host` is to the others, or that they wait for in its place."""
        table = self.sim.store.table
        if host.member >= 0:
            return host.member
        asked = [said["member"] for said in lines(table.get("joins")) if said["token"] == host.name]
        claimed = table.get(f"claim/{host.preferred_rank}", host.name.encode())
        first = host.preferred_rank < self.schedule.members and claimed == host.name.encode()
        return host.preferred_rank if first else next(iter(asked), -1)

    def _is_silent(self, member: int) -> bool:
        return all(self._id_of(host) != member for host in self.hosts.values())

    def _choose(self, task: Task, op: Op) -> Any:
        return self._heartbeat(op) if op.name == "heartbeat" else self._function(op)

    def _heartbeat(self, op: Op) -> Any:
        """Whoever has the member in its view sees it missing."""
        watched = int(op.key)
        watching = [
            host.iteration
            for host in self.hosts.values()
            if host.member not in (-1, watched) and watched in host.machine.record.expected
        ]
        if not self.hosts:  # the server's own monitor stays, and goes by the newest view
            ended = [host for _, host in self.ended]
            last = max(ended, key=lambda host: host.iteration, default=None)
            seen = last is not None and watched in last.machine.record.expected
            return lambda: last.iteration if last is not None and seen else None
        return (lambda: self.sim.random.choice(watching)) if watching else None

    def _function(self, op: Op) -> Any:
        over = self.sim.store.table.get(op.key)

        def end() -> Any:
            if over is not None:
                return self.sim.random.choice(["interrupt", "interrupt", "raise", "return"])
            if self.spend("faults", 0.5):
                return "raise"
            if self.spend("leaves", 0.2):
                return SystemExit(3)
            if self.spend("aborts", 0.1):
                return RestartAbort("function")
            return "return"

        return end

    # -- what must hold ----------------------------------------------------------------------

    def _ledger(self) -> frozenset[int]:
        table = self.sim.store.table
        return frozenset(record["member"] for record in lines(table.get(barrier.LEDGER)))

    def must(self, holds: bool, what: str) -> None:
        """Keeps what is broken: whoever finds it may die before it can say so."""
        if not holds:
            self.broken.append(what)

    def started(self, host: _Host) -> None:
        """R1 and R2, when a member has passed the barrier `start/k`."""
        k, place, expected = host.iteration, host.place, host.machine.record.expected
        assert place is not None
        arrived = lines(self.sim.store.table.get(f"start/{k}/arrived"))
        ranks = sorted(said["rank"] for said in arrived)
        self.must(ranks == list(range(place.world_size)), f"R1: ranks {ranks} in {k}: {place}")
        size = self.sizes.setdefault(k, place.world_size)
        self.must(size == place.world_size, f"R1: world sizes {size}, {place.world_size} in {k}")
        lost = self._ledger()
        for other in self.hosts.values():
            if other is host or other.leaving or other.member in lost:
                continue
            self.must(
                not other.inside or other.iteration == k,
                f"R2: {host.name} enters {k} while {other.name} is in {other.iteration}",
            )
            self.must(
                other.place is None or other.member in expected,
                f"R1: {other.name} is alive, and not in the view of {k}",
            )

    def deciding(self, k: int) -> None:
        """Somebody is about to decide the view of k+1: all have left k (R2), and what is known by
        now must be in the view.
        """
        lost = self._ledger()
        for other in self.hosts.values():
            inside = other.inside and other.iteration == k and not other.leaving
            self.must(
                not inside or other.member in lost,
                f"R2: what follows {k} is decided while {other.name} is in it",
            )
        asked = [said["member"] for said in lines(self.sim.store.table.get("joins"))]
        self.known.setdefault(k + 1, (lost, asked))

    def decided(self, record: ViewRecord) -> None:
        """R1 of a view, when a member goes by it."""
        if record.iteration not in self.known:
            return
        lost, asked = self.known[record.iteration]
        self.must(not record.expected & lost, f"R1: {record} has lost members: {sorted(lost)}")
        if self.schedule.grow is GrowPolicy.NEVER:
            return
        left_out = set(asked) - record.expected - self._ledger()
        self.must(not left_out, f"R1: {record} leaves out {sorted(left_out)}, who asked before")

    def _check_holds(self) -> None:
        """A hold that was over in vain: the job had not got its size, nor had anyone decided."""
        table = self.sim.store.table
        for task, key in self.sim.timeouts[self.timeouts_seen :]:
            self.timeouts_seen += 1
            if not key.startswith("joined/"):
                self.must(False, f"R5: it took a timeout of the wait for {key}")
            elif (host := self.hosts.get(task)) is not None:
                k = host.iteration
                known = lines(table.get("joins")) + lines(table.get(f"start/{k}/arrived"))
                present = {said["member"] for said in known} - self._ledger()
                full = len(present) >= self.schedule.members
                told = range(1, int(table.get("joined", b"0")) + 1)
                if not all(f"joined/{number}" in table for number in told):
                    continue  # who was to end the hold died before it could
                self.must(not full, f"R5: the restart of {k} was held, and the job was full")
                ahead = any(other.iteration > k for other in self.hosts.values())
                self.must(not ahead, f"R5: {k} was held, and was decided")

    def _ended(self, task: Task) -> None:
        if self.reporters.pop(task, None) is not None:
            if task.error is not None:
                raise AssertionError(f"{task.name}: {task.error!r}") from task.error
            return
        host = self.hosts.pop(task)
        self.ended.append((task, host))
        if task.error is None:
            self._completed(task, host)
        else:
            self._failed(task.error, host)

    def _completed(self, task: Task, host: _Host) -> None:
        k, record, table = host.iteration, host.machine.record, self.sim.store.table
        assert table.get(f"over/{k}") == COMPLETED, f"R5: {host.name} completed {k}, which is not"
        if host.member not in record.expected or record.iteration != k:
            assert task.value is None, f"R5: {host.name} was in no view, and returned a value"
            return
        arrived = {said["member"] for said in lines(table.get(f"start/{k}/arrived"))}
        missing = arrived - self.finished.get(k, set())
        assert not missing, f"R5: {k} completed without members {sorted(missing)}"
        assert host.place is not None
        wanted = host.name if host.place.active else None
        assert task.value == wanted, f"R5: {host.name} returned {task.value!r}"

    def _failed(self, error: BaseException, host: _Host) -> None:
        allowed = error is host.given
        if isinstance(error, RestartAbort):
            allowed |= any(said.get("ends_job") for said in self._lost_records())
        elif isinstance(error, RankLostError):
            allowed |= host.member in self.suspected
        elif type(error) is RestartError and self.schedule.grow is GrowPolicy.NEVER:
            allowed |= host.member < 0
        assert allowed, f"R5: {host.name} ended with {error!r}"

    def _lost_records(self) -> list[dict[str, Any]]:
        return lines(self.sim.store.table.get(barrier.LEDGER))

    def finish(self) -> None:
        """What must hold when everybody has ended."""
        self._check_holds()
        assert not self.broken, "; ".join(self.broken)
        completed = {host.iteration for task, host in self.ended if task.error is None}
        assert len(completed) <= 1, f"R5: members completed in iterations {sorted(completed)}"
        enders = {host.member for _, host in self.ended if isinstance(host.given, RestartAbort)}
        assert not (completed and enders - self.suspected), "R5: a job that was ended has completed"
        if completed:
            done = self.sim.store.table.get(barrier.done_key("goodbye"))
            assert done is not None, "R5: the store's host waits for a goodbye for ever"
        # Each decision may be held once, and once more by a newcomer after the death of all.
        held = _HOLD * (len(self.known) + self.born)
        assert self.sim.clock.now() <= held, f"R5: it took {self.sim.clock.now()} s"


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
        world.finish()
    except AssertionError as e:
        tail = "\n".join(sim.trace[-60:])
        what = "; ".join(world.broken) or str(e)
        raise AssertionError(f"{what}\nseed {seed}: {world.schedule}\n{tail}") from e
    return Result(
        returned={task.name: task.value for task, _ in world.ended if task.error is None},
        raised={task.name: task.error for task, _ in world.ended if task.error is not None},
        iterations=max(world.sizes, default=-1) + 1,
        steps=sim.steps,
        seconds=sim.clock.now(),
    )
