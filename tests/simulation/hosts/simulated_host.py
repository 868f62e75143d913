"""One host of a simulated group: its clock, its node, and what it asks of the store."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from outlast.coordination.replicated.messages import (
    Announce,
    AppendAnswer,
    Handover,
    Leave,
    Refusal,
    Snapshot,
    VoteAnswer,
)
from outlast.coordination.replicated.node import Node
from outlast.coordination.replicated.operations import Failed, Operation
from outlast.coordination.replicated.quorum import Configuration, Voters
from simulation.hosts.history import Call
from simulation.hosts.workload import next_operation
from simulation.hosts.world import HostClock

if TYPE_CHECKING:
    from simulation.hosts.simulate import HostSimulation

PAST = float("-inf")


class SimulatedHost(HostClock):
    """Drives a `Node` as the host service does.

    Attributes:
        acts_until: until when it may act as the leader, by the true clock.
        page: what its ranks see of its read lease.
    """

    def __init__(self, sim: HostSimulation, name: str, founding: Configuration | None) -> None:
        r = sim.random
        self.sim = sim
        self.name = name
        self.alive = True
        self.paused = False
        self.leaving = False
        self.acts_until = PAST
        self.page = 0, PAST
        self.calls: list[Call] = []
        super().__init__(r, 0.95, 0.1)
        self._open: dict[int, Call] = {}
        self._waiting: list[tuple[str, Any]] = []
        self._waiting_for_disk: list[tuple[tuple[int, Voters, bool], ...]] = []
        self._tick_at = float("inf")
        self._checked = 0
        self._left = sim.schedule.operations
        self.node = Node(
            name,
            sim.timing,
            random.Random(r.random()),
            founding=founding,
            kept=sim.schedule.kept,
        )
        self._configurations: object = None
        self._disk_idle_at = 0.0

    def lease_end(self) -> float:
        """Until when this host may act, by the true clock."""
        return self.true(self.node.host.until)

    # ------------------------------------------------------------------ events
    def begin(self) -> None:
        """Starts the node and the workload."""
        self._tick_at = self.sim.now
        self.sim.at(self.sim.now, self._tick, self.sim.now)
        self._plan_operation()

    def deliver(self, sender: str, message: Any) -> None:
        """A message arrives; a host that is stopped finds it when it goes on."""
        if not self.alive:
            return
        if self.paused:
            self._waiting.append((sender, message))
            return
        self._count(message)
        self.node.receive(sender, message, self.clock(self.sim.now))
        self.end_round()

    def _count(self, message: Any) -> None:
        seen = self.sim.sometimes
        if isinstance(message, VoteAnswer):
            what = "pre-vote" if message.pre_vote else "vote"
            seen[f"{what} {'granted' if message.granted else 'denied'}"] += 1
        elif isinstance(message, AppendAnswer):
            seen["entries refused"] += not message.accepted
        elif isinstance(message, Snapshot | Refusal | Handover | Leave | Announce):
            seen[type(message).__name__] += 1

    def go_on(self) -> None:
        """Ends a pause. The host finds its messages and its timers in any order."""
        if not self.paused:
            return
        self.paused = False
        waiting, self._waiting = self._waiting, []
        if self.sim.random.random() < 0.5:  # a worker was waiting
            self.ask(Operation("read", self.sim.random.choice(["sum", "list"])))
        if self.sim.random.random() < 0.5:
            self._tick(self._tick_at)
        for sender, message in waiting:
            self.deliver(sender, message)
        written, self._waiting_for_disk = self._waiting_for_disk, []
        for found in written:
            self._wrote(found)
        self._tick(self._tick_at)
        self._plan_operation()

    def _tick(self, planned: float) -> None:
        if planned != self._tick_at or not self.alive or self.paused:
            return  # there is an earlier one, or it happens after the pause
        self._tick_at = float("inf")
        self.node.tick(self.clock(self.sim.now))
        self.end_round()

    def leave(self) -> None:
        """Leaves in order: its workers have ended."""
        self.leaving = True
        self.node.leave("it has finished", self.clock(self.sim.now))
        self.end_round()

    # ------------------------------------------------------------------ operations
    def _plan_operation(self) -> None:
        if self._left > 0:
            self.sim.at(self.sim.now + 2 * self.sim.random.random(), self._next_operation)

    def _next_operation(self) -> None:
        if not self.alive or self.paused or self.leaving or self._left <= 0:
            return
        self._left -= 1
        for _ in range(self.sim.random.choice([1, 1, 3])):
            free = self.sim.model.free_entry()
            self.ask(next_operation(self.sim.random, self.name, len(self.calls), free))
        self._plan_operation()

    def ask(self, operation: Operation) -> Call:
        """Starts an operation."""
        number = self.node.submit(operation, self.clock(self.sim.now))
        call = Call(self.name, number, operation, self.sim.now)
        self._open[number] = call
        self.calls.append(call)
        self.end_round()
        return call

    # ------------------------------------------------------------------ after each event
    def end_round(self) -> None:
        """Sends what there is to send, takes the results, and checks what must hold."""
        sim, node = self.sim, self.node
        sending = node.outbox()
        self.page = node.host.covered, node.host.reads_until
        for to, message in sending:
            sim.send(self.name, to, message)
        self._keep(node.configurations)
        for ticket, result in node.results():
            call = self._open.pop(ticket)
            call.failed = isinstance(result, Failed)
            if not call.failed:
                call.result, call.end = result, sim.now
                sim.saw_answer(call)
        self._observe()
        if node.host.refused is not None and node.host.refused.orderly:
            self.alive = False
            return
        # A little later, because a rounded time may be a little early, and nothing due yet.
        due = max(self.true(node.next_tick()) + 1e-6, sim.now)
        if due < self._tick_at:
            self._tick_at = due
            sim.at(due, self._tick, due)

    def _keep(self, found: tuple[tuple[int, Voters, bool], ...]) -> None:
        if found == self._configurations:
            return
        self._configurations = found
        delay_s = self.sim.schedule.disk_s * self.sim.random.random() ** 2
        self._disk_idle_at = max(self._disk_idle_at, self.sim.now) + delay_s
        self.sim.at(self._disk_idle_at, self._wrote, found)

    def _wrote(self, found: tuple[tuple[int, Voters, bool], ...]) -> None:
        """The disk goes on while the host is stopped, and tells it afterwards."""
        if self.paused:
            self._waiting_for_disk.append(found)
        elif self.alive:
            self.node.wrote(found)
            now = self.clock(self.sim.now)
            if now >= self.node.next_tick():
                self.node.tick(now)  # as the host service: after a pause, it leads no more
            self.end_round()

    def _observe(self) -> None:
        sim, node = self.sim, self.node
        leader = node._leader
        self.acts_until = PAST
        if leader is not None and node.leads:
            now = self.clock(sim.now)
            heard = leader.quorum_heard(now) + node.timing.quorum_lease
            self.acts_until = self.true(heard)
            sim.saw_leader(self, leader.term)
        voter = node._voter
        while self._checked < voter.applied:
            self._checked = max(self._checked, voter.log.base)
            if self._checked < voter.applied:
                self._checked += 1
                term = voter.log.term(self._checked)
                assert term is not None
                sim.saw_committed(self._checked, term, voter.log.change(self._checked))
        if self.name in sim.model.gone and not self.leaving:
            end = self.lease_end()
            sim.must(end <= sim.now, f"{self.name} is lost, and has a lease until {end:.3f} s")
