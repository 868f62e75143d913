"""The hosts of a simulated job. A host is lost with all that runs on it: it dies, or is cut off.

When a host dies, its members and their monitors stop between any two operations. When it is cut
off, they run on, but their operations are not performed. Either way, each operation that was under
way may still be performed, until the launcher of another host finds that the lease of the lost one
is over: from then on nothing of the lost host runs, and the store performs nothing of it. That
launcher then reports the loss, and another host takes the place, or its ranks are given up. The
launcher may be lost in the middle, or be replaced by another that does not wait for it to finish.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from outlast.coordination import moves
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link, Op, request
from outlast.events.fault_record import FaultRecord
from outlast.inprocess.attribution import Interruption
from simulation.fault_budget import Budget, Schedule
from simulation.scheduler import Simulation, Task

_WRITES = frozenset({"put", "claim", "add", "append", "delete"})


@dataclasses.dataclass(eq=False)
class SimulatedHost:
    """A host, and its state."""

    id: str
    place: int
    ranks: range
    up: bool = True  # it runs, and the store performs its operations
    fenced: bool = False  # nothing of it runs, and the store performs nothing of it
    has_successor: bool = False  # another host takes its place, once it is fenced
    joins_early: bool = False  # the successor starts before the loss is reported
    succeeded: bool = False
    predecessor: SimulatedHost | None = None  # whose ranks are to move to this one
    late: list[Task] = dataclasses.field(default_factory=list)  # operations that were under way


class SimulatedHosts:
    """The hosts of a job, if the schedule has any. There is always one more, without a member,
    which is never lost: its launcher can report the loss of all others.

    Args:
        start: starts a process with a rank, on the host that `of_rank` returns, and says which
            host it succeeds.
        lost: called when a task has been stopped because its host is lost.
        stays: called when the ranks of a host that was to leave stay where they are.
    """

    def __init__(
        self,
        schedule: Schedule,
        sim: Simulation,
        budget: Budget,
        start: Callable[[int, tuple[range, str, str] | None], None],
        lost: Callable[[Task], None],
        stays: Callable[[str], None],
    ) -> None:
        self._schedule, self._sim, self._budget = schedule, sim, budget
        self._start, self._lost, self._stays = start, lost, stays
        self._leaving: list[SimulatedHost] = []
        self._born = 0
        self._where: dict[Task, SimulatedHost] = {}
        self._reports: dict[Task, SimulatedHost] = {}  # what launchers do about lost hosts
        self._spare = SimulatedHost("spare", -1, range(0))
        self._places: list[SimulatedHost] = []
        if schedule.per_host:
            for place in range(schedule.members // schedule.per_host + 1):
                self._places.append(self._new_host(place))

    @property
    def reporting(self) -> bool:
        """Whether a launcher still has to do with a lost host, and may start another one."""
        return bool(self._reports)

    def of_rank(self, rank: int) -> SimulatedHost:
        """The host on which processes with this rank run."""
        return self._places[rank // self._schedule.per_host] if self._places else self._spare

    @property
    def up(self) -> list[SimulatedHost]:
        """The hosts that run and have a place."""
        return [host for host in self._places if host.up]

    def move(self, host: SimulatedHost, *, alone: bool) -> None:
        """A host is to leave: another one gets its place, now or, if it leaves `alone`, later."""
        to = self._places[host.place] = self._new_host(host.place)
        to.predecessor = None if alone else host
        self._leaving.append(host)

    def where(self, host_id: str) -> SimulatedHost:
        """The host with this ID."""
        hosts = (*self._places, *self._leaving)
        return next((host for host in hosts if host.id == host_id), self._spare)

    def any(self) -> SimulatedHost:
        """A host that runs."""
        if not self._places:
            return self._spare
        return self._sim.random.choice([self._spare, *(h for h in self._places if h.up)])

    def run(self, task: Task, host: SimulatedHost) -> None:
        """Starts a task on a host; on one that is cut off, its operations are not performed."""
        task.cut_off = not host.up
        if self._places:
            self._where[task] = host
        self._sim.add(task)

    def lives_on(self, task: Task) -> SimulatedHost:
        """The host on which a task was started."""
        return self._where.get(task, self._spare)

    def before_step(self) -> bool:
        """Losses, of hosts and of launchers that report one. Returns whether there was one."""
        if self._budget.spend("host_losses", self._schedule.p_death):
            up = [host for host in (*self._places, *self._leaving) if host.up]
            if up:
                self._lose(self._sim.random.choice(up), cut_off=self._sim.random.random() < 0.4)
            return True
        if self._reports and self._budget.spend("launcher_losses", 0.1):
            task = self._sim.random.choice(list(self._reports))
            host = self._reports[task]
            if self._sim.random.random() < 0.7:
                del self._reports[task]
                self._sim.kill(task)
            self._report(host)  # by another launcher, which may report it at the same time
            return True
        return False

    def choose(self, op: Op) -> Callable[[], Any] | None:
        """Performs an operation of a launcher that is not one of the store."""
        host = next(host for host in self._reports.values() if host.id == op.key)
        act = {"lease": self._fence, "succeed": self._succeed, "stay": self._stay}[op.name]
        return lambda: act(host)

    def _new_host(self, place: int) -> SimulatedHost:
        self._born += 1
        each = self._schedule.per_host
        return SimulatedHost(f"h{self._born}", place, range(place * each, (place + 1) * each))

    def _lose(self, host: SimulatedHost, *, cut_off: bool) -> None:
        self._sim.trace.append(f"{self._sim.steps}: {host.id} {'cut off' if cut_off else 'dies'}")
        host.up = False
        host.has_successor = host not in self._leaving and self._budget.spend("new_hosts", 0.8)
        host.joins_early = self._sim.random.random() < 0.3 and host.predecessor is None
        tasks = self._tasks(host)
        for task in tasks:
            if task.op is not None and task.op.name in _WRITES and self._sim.random.random() < 0.5:
                host.late.append(Task(f"late {task.name}", _perform(task.op), slow=2))
                self._sim.add(host.late[-1])
            task.cut_off = True
        if not cut_off:
            self._stop(tasks)
        self._report(host)

    def _tasks(self, host: SimulatedHost) -> list[Task]:
        return [task for task, where in self._where.items() if where is host and not task.ended]

    def _stop(self, tasks: list[Task]) -> None:
        for task in tasks:
            if task.ended:
                continue  # a thread of another one
            self._sim.kill(task)
            about = self._reports.pop(task, None)
            if about is not None:
                self._report(about)
            else:
                self._lost(task)

    def _report(self, host: SimulatedHost) -> None:
        where = self.any()
        task = Task(f"launcher of {where.id}", self._handle(host), slow=5, on_end=self._reported)
        self._reports[task] = host
        self.run(task, where)

    async def _handle(self, host: SimulatedHost) -> None:
        """What a launcher does about a lost host; another one may have done a part of it."""
        membership = MembershipProtocol(Link(), self._schedule.members)
        await request(Op("lease", host.id))
        if host.has_successor and host.joins_early:
            await request(Op("succeed", host.id))
        killed = Interruption.TERMINATED.value
        fault = FaultRecord(0, -1, host.ranks[0], host.id, -1, killed, f"host {host.id} was lost")
        await membership.report_ended(host.id, host.ranks, fault)
        if (old := host.predecessor) is not None and old.up:
            ranks = range(old.ranks.start, min(old.ranks.stop, self._schedule.members))
            if await moves.train(membership, ranks, old.id):
                await request(Op("stay", host.id))
                return
        if host.has_successor:
            await request(Op("succeed", host.id))
        elif self._schedule.await_full and host not in self._leaving:
            await membership.give_up(frozenset(host.ranks))

    def _reported(self, task: Task) -> None:
        del self._reports[task]
        if task.error is not None:
            raise AssertionError(f"{task.name}: {task.error!r}") from task.error

    def _fence(self, host: SimulatedHost) -> None:
        if not host.fenced:
            self._sim.trace.append(f"{self._sim.steps}: {host.id} fenced")
            host.fenced = True
            self._stop(self._tasks(host))
            for task in host.late:
                if not task.ended:
                    self._sim.kill(task)

    def _succeed(self, host: SimulatedHost) -> None:
        if not host.succeeded:
            host.succeeded = True
            new = self._places[host.place] = self._new_host(host.place)
            old = new.predecessor = host.predecessor
            there = old is not None and old in self._leaving
            for rank in host.ranks:
                if rank < self._schedule.members:
                    self._start(rank, (host.ranks, old.id, "why") if old and there else None)

    def _stay(self, host: SimulatedHost) -> None:
        old = host.predecessor
        if not host.succeeded and old is not None and old in self._leaving:
            host.succeeded = True
            self._places[host.place] = old
            self._leaving.remove(old)
            self._stays(old.id)


async def _perform(op: Op) -> None:
    await request(op)
