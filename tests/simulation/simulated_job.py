"""A simulated job: deaths, suspicions, joiners, and the results of calls, as the seed decides."""

from __future__ import annotations

from typing import Any

from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link, Op, drive, perform_on, request
from outlast.coordination.records import LostRecord, StopRecord, lines, process_token
from outlast.errors import RestartAbort
from outlast.inprocess.attribution import Interruption
from simulation.fault_budget import Budget, Schedule
from simulation.invariants import Invariants
from simulation.scheduler import Simulation, Task
from simulation.simulated_hosts import SimulatedHost, SimulatedHosts
from simulation.simulated_member import STOPPED, SimulatedMember
from simulation.simulated_moves import SimulatedMoves

_NEVER = b""
"""In place of the last step on which the ranks have agreed: no rank is stopped."""


class SimulatedJob:
    """The members, the monitors of the dead ones, and what may still happen to them."""

    def __init__(self, seed: int, schedule: Schedule) -> None:
        self.schedule = schedule
        self.sim = Simulation(seed, self._choose)
        self.budget = Budget(schedule, self.sim.random)
        self.members: dict[Task, SimulatedMember] = {}
        self.reporters: dict[Task, SimulatedMember] = {}
        self.ended: list[tuple[Task, SimulatedMember]] = []
        self.invariants = Invariants(schedule, self.sim, self.members)
        self.moves = SimulatedMoves(self, self.start)
        self.hosts = SimulatedHosts(
            schedule, self.sim, self.budget, self.start, self._lost, self.moves.stays
        )
        self.born, self.size = 0, schedule.members
        for rank in range(schedule.members):
            self.start(rank)

    def start(
        self,
        rank: int,
        succeeds: tuple[range, str, str] | None = None,
        at: SimulatedHost | None = None,
    ) -> None:
        """A new process, started as `rank` on that host, or on that of the rank, if it runs."""
        at = at or self.hosts.of_rank(rank)
        if not at.up:
            return
        self.born += 1
        host = SimulatedMember(
            f"p{self.born}",
            rank,
            self.sim.clock,
            self.schedule,
            self.budget,
            self.invariants,
            self.moves,
            succeeds,
        )
        if self.schedule.per_host:
            host.host_id, host.token = at.id, process_token(at.id, host.name)
        slow = self.sim.random.choice([1, 1, 1, 10])
        task = Task(host.name, host.live(), slow=slow, on_end=self._ended)
        self.members[task] = host
        self.hosts.run(task, at)

    def before_step(self) -> None:
        """Deaths, of hosts, main processes and reporting monitors, suspicions, and joiners."""
        self.invariants.watch()
        self.invariants.check_holds()
        assert not self.invariants.broken
        if not self.members or self.hosts.before_step():
            return
        if self.budget.spend("deaths", self.schedule.p_death):
            task = self.sim.random.choice(list(self.members))
            host = self.members.pop(task)
            self.sim.kill(task)
            self._watch(host, self._monitor(host), self.hosts.lives_on(task))
            if not self.moves.replaces(host) and self.budget.spend("joins", 0.7):
                self.start(host.preferred_rank)
        elif self.reporters and self.budget.spend("double_deaths", 0.05):
            task = self.sim.random.choice(list(self.reporters))
            host = self.reporters.pop(task)
            self.sim.kill(task)
            self._watch(host, self._observer(host))
        elif self.budget.spend("suspicions", 0.01):
            host = self.sim.random.choice(list(self.members.values()))
            self._watch(host, self._observer(host, suspected=True))
        elif self.budget.spend("moves", 0.01):
            self.moves.begin()
        elif self.budget.spend("stops", 0.02):
            self._watch(self.sim.random.choice(list(self.members.values())), self._stop())
        elif self.budget.spend("joins", 0.002):
            self.start(self.sim.random.randrange(self.schedule.members + 1))

    def _watch(
        self, host: SimulatedMember, report: Any, where: SimulatedHost | None = None
    ) -> None:
        task = Task(f"{report.__name__} of {host.name}", report, on_end=self._ended)
        self.reporters[task] = host
        self.hosts.run(task, where or self.hosts.any())

    def _lost(self, task: Task) -> None:
        """A member, or a process that reports one, was lost with its host."""
        if self.moves.lost(task):
            return
        about = self.reporters.pop(task, None)
        if about is None:
            del self.members[task]
        elif about.host_id != self.hosts.lives_on(task).id:
            self._watch(about, self._observer(about))

    async def _monitor(self, host: SimulatedMember) -> None:
        """The monitor of a dead member reports its death."""
        membership = MembershipProtocol(Link(), self.schedule.members, host.rules)
        fault = host.fault_in(host.iteration, "killed", Interruption.TERMINATED)
        rank, token, member = host.preferred_rank, host.token, host.member
        await membership.report_killed(token, rank, member, fault)

    async def _stop(self) -> None:
        """A process of the job is told to stop."""
        membership = MembershipProtocol(Link(), self.schedule.members)
        await membership.request_stop(StopRecord("a signal", STOPPED))

    async def _observer(self, host: SimulatedMember, suspected: bool = False) -> None:
        """The monitor of another member no longer sees a heartbeat of this one."""
        member = self._id_of(host)
        at = await request(Op("heartbeat", str(member)))
        if at is None or not (suspected or self._is_silent(member)):
            return
        self.invariants.suspected.add(member)
        fault = host.fault_in(at, "no heartbeat", Interruption.UNRESPONSIVE)
        membership = MembershipProtocol(Link(), self.schedule.members)
        await membership.report_lost(LostRecord(member, fault.cause), at, fault)

    def _id_of(self, host: SimulatedMember) -> int:
        """The member id of `host`, or the one under which the others wait for it."""
        table = self.sim.store.table
        if host.member >= 0:
            return host.member
        token = host.token
        asked = [said["member"] for said in lines(table.get("joins")) if said["token"] == token]
        claimed = table.get(f"claim/{host.preferred_rank}", token.encode())
        first = host.preferred_rank < self.schedule.members and claimed == token.encode()
        return host.preferred_rank if first else next(iter(asked), -1)

    def _is_silent(self, member: int) -> bool:
        return all(self._id_of(host) != member for host in self.members.values())

    def _choose(self, task: Task, op: Op) -> Any:
        if op.name == "function":
            return lambda: self._function(self.members[task], op)
        if task.cut_off:
            return None
        if op.name == "exchange":
            return self._exchange(self.members[task], op)
        return self._heartbeat(op) if op.name == "heartbeat" else self.hosts.choose(op)

    def _heartbeat(self, op: Op) -> Any:
        """A member that has the silent one in its view reports it, at its own iteration."""
        watched = int(op.key)
        watching = [
            host.iteration
            for task, host in self.members.items()
            if not task.cut_off
            and host.member not in (-1, watched)
            and watched in host.machine.record.expected
        ]
        if not watching and not self.hosts.reporting:
            return self._server(watched)
        return (lambda: self.sim.random.choice(watching)) if watching else None

    def _server(self, watched: int) -> Any:
        """The store's own monitor stays, and follows the newest view. It counts if no member of
        that view is alive.
        """
        membership = MembershipProtocol(Link(), self.schedule.members)
        perform = perform_on(self.sim.store)
        newest = drive(membership.current(), perform)
        view = drive(membership.view(newest), perform)
        members = frozenset[int]() if view is None else view.expected
        if any(host.member in members for host in self.members.values()):
            return None
        if watched in members:
            return lambda: newest
        return None if self.members else lambda: None  # a later view may have the silent one

    def _exchange(self, host: SimulatedMember, op: Op) -> Any:
        """Whether all active ranks have come to the end of the agreed step; or are interrupted."""
        assert host.assigned is not None
        passed = int(self.sim.store.table[op.key]) >= host.assigned.actives
        over = f"over/{host.iteration}" in self.sim.store.table
        result = passed and not (over and self.sim.random.random() < 0.5)
        return (lambda: result) if passed or over else None

    def _function(self, host: SimulatedMember, op: Op) -> Any:
        table, agreed = self.sim.store.table, op.key.replace("over", "agreed")
        moves = table.get(agreed, _NEVER) != _NEVER
        if op.key in table:
            if moves and self.sim.random.random() < 0.3:
                return "move"
            return self.sim.random.choice(["interrupt", "interrupt", "raise", "return"])
        if self.budget.spend("faults", 0.5):
            return "raise"
        if self.budget.spend("leaves", 0.2):
            return SystemExit(3)
        if self.budget.spend("aborts", 0.1):
            return RestartAbort("function")
        if moves:
            return "move"
        record = host.machine.record
        if self.schedule.moves and agreed not in table and not (record.stop or record.saves):
            waits = self.schedule.patient and (self.budget.left("moves") or self.moves.pending())
            if waits or self.sim.random.random() < 0.9:
                return "step"
            table[agreed] = _NEVER  # this rank begins no more steps
        return "return"

    def _ended(self, task: Task) -> None:
        if self.reporters.pop(task, None) is not None:
            if task.error is not None:
                raise AssertionError(f"{task.name}: {task.error!r}") from task.error
            return
        host = self.members.pop(task)
        self.ended.append((task, host))
        if task.error is None:
            self.invariants.completed(task, host)
        else:
            self.invariants.failed(task.error, host)
