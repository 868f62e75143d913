"""Ranks and hosts of a simulated job that are to leave it in order, as launchers have them do.

A launcher starts the successors of a rank, or of all ranks of a host, or asks these to leave
without. Any of them, and the host that takes over, may be lost at any time: its launcher starts
another successor, or has the ranks stay where they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from outlast.coordination import moves
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link, drive, perform_on
from outlast.coordination.records import belongs_to, lines, to_line
from simulation.scheduler import Task

if TYPE_CHECKING:
    from simulation.simulated_job import SimulatedJob
    from simulation.simulated_member import SimulatedMember


@dataclasses.dataclass(eq=False)
class Move:
    """Ranks that are to leave `owner`: the ID of a host, or the token of a process."""

    owner: str
    ranks: range
    asks: Task | None = None  # the launcher that asks them to leave without successors

    @property
    def succeeds(self) -> tuple[range, str, str]:
        return self.ranks, self.owner, "why"


class SimulatedMoves:
    """The moves of a job. `start` starts a process as a rank, to succeed one that is to leave."""

    def __init__(self, job: SimulatedJob, start: Callable[..., None]) -> None:
        self._job, self._start = job, start
        self._watches: dict[SimulatedMember, Task] = {}
        self.open: list[Move] = []
        self.replaced = 0  # how many ranks died before they left, and were replaced on their host

    def begin(self) -> None:
        """A host, or a rank of a job without hosts, is to leave, if all its ranks are there."""
        job, r = self._job, self._job.sim.random
        host = r.choice(job.hosts.up) if job.hosts.up else None
        if host is not None:
            move = Move(host.id, range(host.ranks.start, min(host.ranks.stop, job.size)))
        elif job.schedule.per_host:
            return
        else:
            member = r.choice(list(job.members.values()))
            move = Move(member.token, range(member.preferred_rank, member.preferred_rank + 1))
        membership = MembershipProtocol(Link(), job.size)
        perform = perform_on(job.sim.store)
        there = drive(moves.train(membership, move.ranks, move.owner), perform)
        if not there or not move.ranks or self.of(move.owner) is not None:
            return  # the launchers wait for that, and it moves only once
        self.open.append(move)
        alone = r.random() < 0.3
        if host is not None:
            job.hosts.move(host, alone=alone)
        if alone:
            move.asks = Task(f"launcher of {move.owner}", self._ask(move))
            job.hosts.run(move.asks, job.hosts.any())
            return
        for rank in move.ranks:
            self._start(rank, move.succeeds)

    def of(self, owner: str) -> Move | None:
        return next((move for move in self.open if move.owner == owner), None)

    def replaces(self, host: SimulatedMember) -> bool:
        """A member has died: starts another one, if it was a successor, or if the launcher of a
        host that leaves replaces it. Whether no other launcher does.
        """
        if host.succeeds is not None and (move := self.of(host.succeeds[1])) is not None:
            self._start(host.preferred_rank, move.succeeds)
            return True
        leaves = self.of(host.host_id)
        if leaves is not None and leaves.asks is None:
            membership = MembershipProtocol(Link(), self._job.size)
            replaces = moves.replaces(membership, host.preferred_rank, host.host_id)
            if drive(replaces, perform_on(self._job.sim.store)):
                self._start(host.preferred_rank, at=self._job.hosts.where(host.host_id))
                self.replaced += 1
        return leaves is not None or self.of(host.token) is not None

    def pending(self) -> bool:
        """Whether ranks are to leave, and can: each has a living successor, or was asked."""
        return any(self._can(move) for move in self.open)

    def _can(self, move: Move) -> bool:
        members = list(self._job.members.values())
        here = [each for each in members if belongs_to(each.token, move.owner)]
        if not here or any(each.assigned is None for each in here):
            return False  # one that waits to be admitted leaves after that
        wait = [each for each in members if each.assigned is None]
        next_ = {each.preferred_rank for each in wait if each.succeeds == move.succeeds}
        asked = lines(self._job.sim.store.table.get("leaves"))
        return (
            next_.issuperset(each.preferred_rank for each in here)
            or (move.asks is not None and not move.asks.ended)
            or any(each.member in line["members"] for line in asked for each in here)
        )

    # -- rank 0 of an iteration waits for requests, in a thread of its process

    def watch(self, member: SimulatedMember) -> None:
        task = Task(f"watch of {member.name}", self._watch(member), slow=3)
        self._watches[member] = task
        self._job.hosts.run(task, self._job.hosts.where(member.host_id))

    def end_watch(self, member: SimulatedMember) -> None:
        """The member has left its function, or is dead."""
        task = self._watches.pop(member, None)
        if task is not None and not task.ended:
            self._job.sim.kill(task)

    def lost(self, task: Task) -> bool:
        """Whether a task that was lost with its host is one of these."""
        if any(move.asks is task for move in self.open):
            move = next(move for move in self.open if move.asks is task)
            move.asks = None
            return True
        return task in self._watches.values()

    async def _watch(self, member: SimulatedMember) -> None:
        membership, k = member.machine.membership, member.iteration
        await moves.begin_to_wait(membership, k, 1)
        while True:
            number, wanted = await moves.requests(membership, member.machine.record.expected)
            if wanted is not None:
                self._check(wanted)
                await membership.link.claim(f"agreed/{k}", to_line(wanted))
                return
            await membership.link.wait_for(moves.leave_key(k, number), None)

    def _check(self, wanted: moves.LeaveRequest) -> None:
        """No rank leaves before each of its host has a successor, if it is to have one; and the
        ranks agree on a step only if some leave or join.
        """
        asked = {said["succeeds"] for said in lines(self._job.sim.store.table.get("joins"))}
        has = not wanted.succeeded or asked.issuperset(wanted.members)
        self._job.invariants.must(has, f"R5: {wanted} is made, and {asked} have successors")
        asks = wanted.members or wanted.joiners
        self._job.invariants.must(bool(asks), f"R5: {wanted} is for nobody")

    async def _ask(self, move: Move) -> None:
        membership = MembershipProtocol(Link(), self._job.size)
        members = await moves.holders(membership, move.ranks, move.owner)
        if members:
            leave = moves.LeaveRequest(members, "why", succeeded=False)
            await moves.request_leave(membership, leave)
        if self._job.schedule.await_full:
            await membership.give_up(frozenset(move.ranks))

    def stays(self, owner: str) -> None:
        """The ranks of this host stay where they are: the host that was to take them is lost."""
        self.open = [move for move in self.open if move.owner != owner]
