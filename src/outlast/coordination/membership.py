"""How members agree: on the end of an iteration, on who is lost, and on the next view.

Keys of iteration k (under the prefix of one call):

    view/k     the agreed `ViewRecord`                        first claim wins
    start/k    barrier before the function
    over/k     how the iteration ended: restart | completed   first claim wins
    done/k     how many have returned from the function
    fault/k    log of the faults
    store/k    where the function finds a store of its own
    term/k     barrier after everyone has left the function

and of the whole call: `ledger` (members lost for good), `joins` (who asked to take part),
`current` (a recent k, for newcomers), `goodbye` (a barrier that only the store's host waits for).

Why one key `over/k`: "all have completed" and "somebody failed" can happen in the same instant.
The store orders the two claims, and every member goes by the one that won.

Why each loss is recorded in this order (`report_lost`): ledger, then claims of `over`, then
checks of barriers, for every iteration whose view includes the member, from the one it was last
known at onwards. Whoever decides a view reads the ledger before. If the decision includes a
member whose loss is in the ledger by then, it cannot have seen it, so the ledger entry came after
that read; the arrivals at `start` of the new view come after the decision and read the ledger
again, so the barrier passes without the lost one, and its missing place starts the next restart.
"""

from __future__ import annotations

import dataclasses

from outlast.coordination import barrier
from outlast.coordination.ops import Link
from outlast.coordination.records import FaultRecord, LostRecord, lines, to_line
from outlast.coordination.view import Joiner, ViewRecord, decide

__all__ = ["COMPLETED", "RESTART", "MembershipProtocol"]

RESTART = b"restart"
COMPLETED = b"completed"


class MembershipProtocol:
    """The protocol of one call, for one member. Holds no state but the link.

    Args:
        link: the store, with the prefix of the call.
        world_size: how many members the job started with.
    """

    def __init__(self, link: Link, world_size: int) -> None:
        self.link = link
        self.world_size = world_size

    # -- coming in ---------------------------------------------------------------------------

    async def register(self, rank: int, token: str) -> int | None:
        """Claims the first place `rank`; returns the member id, or `None` if it was taken before:
        then this process is a newcomer, and joins.

        `token` is known to the monitor of this process before the claim, so that a death right
        after the claim can still be told from a place that was never taken.
        """
        if not 0 <= rank < self.world_size:
            return None
        # The view first: once a place is taken, there is a view that its loss can be told to.
        first = ViewRecord(0, tuple(range(self.world_size)))
        await self.link.claim("view/0", first.encode())
        held = await self.link.claim(f"claim/{rank}", token.encode())
        return rank if held == token.encode() else None

    async def ask_to_join(self, preferred: int, token: str) -> int:
        """Asks to take part; returns the new member id. By `token` the monitor of this process
        finds the request, should the process die before it has told its monitor the id.
        """
        member = self.world_size - 1 + await self.link.add("ids", 1)
        await self.link.append("joins", to_line(Joiner(member, preferred, token)))
        await self.wake_holders()
        return member

    async def wake_holders(self) -> None:
        """Wakes those that hold a restart for replacements: one has asked, or somebody has
        decided. A holder reads `joined`, then looks, then waits for the next number; what it did
        not see was said after its look, and so under that number or a later one.
        """
        await self.link.put(f"joined/{await self.link.add('joined', 1)}", b"1")

    async def joiners(self) -> list[Joiner]:
        """Everyone that ever asked to join, in that order."""
        return [Joiner(**record) for record in lines(await self.link.read("joins"))]

    async def current(self) -> int:
        """The newest iteration that is decided."""
        iteration = int(await self.link.read("current") or b"0")
        while await self.view(iteration + 1) is not None:
            iteration += 1
        return iteration

    # -- within an iteration -----------------------------------------------------------------

    async def view(self, iteration: int) -> ViewRecord | None:
        """The decided view, or `None` while it is not."""
        data = await self.link.read(f"view/{iteration}")
        return None if data is None else ViewRecord.decode(data)

    async def over(self, iteration: int) -> bytes | None:
        """How the iteration ended (`RESTART`, `COMPLETED`), or `None` while it runs."""
        return await self.link.read(f"over/{iteration}")

    async def end(self, iteration: int, how: bytes) -> bytes:
        """Ends the iteration, unless it has ended; returns how it did."""
        return await self.link.claim(f"over/{iteration}", how)

    async def finish(self, iteration: int, members: int) -> None:
        """This member has returned from the function; the last of `members` completes the job.

        Lost members are not left out of the count: a loss restarts the iteration, unless the
        member had returned before it was lost.
        """
        if await self.link.add(f"done/{iteration}", 1) >= members:
            await self.end(iteration, COMPLETED)

    async def faults(self, iteration: int) -> list[FaultRecord]:
        """The faults of an iteration, in the order in which they were reported."""
        return [
            FaultRecord(**record) for record in lines(await self.link.read(f"fault/{iteration}"))
        ]

    async def report_fault(self, fault: FaultRecord) -> None:
        """Records a fault of a member that goes on, and ends the iteration."""
        await self.link.append(f"fault/{fault.iteration}", to_line(fault))
        await self.end(fault.iteration, RESTART)

    async def report_lost(
        self, lost: LostRecord, iteration: int, fault: FaultRecord | None = None
    ) -> None:
        """Records that a member is out of the job; wakes everyone that may wait for it.

        Args:
            lost: who, and why.
            iteration: where it was last known to be; -1 if it was not known to be anywhere.
            fault: what it died of, if that is a fault of the iteration.
        """
        if fault is not None:
            await self.link.append(f"fault/{fault.iteration}", to_line(fault))
        await self.link.append(barrier.LEDGER, to_line(lost))
        at = await self.current() if iteration < 0 else iteration
        while (view := await self.view(at)) is not None:
            if lost.member in view.expected:
                if not lost.discarded:
                    await self.end(at, RESTART)
                await barrier.check(self.link, f"start/{at}", view.expected)
                await barrier.check(self.link, f"term/{at}", view.expected)
                await barrier.check(self.link, "goodbye", view.expected)
            at += 1

    async def report_killed(self, rank: int, token: str, member: int, fault: FaultRecord) -> None:
        """Records that a process ended without a word; its monitor's part.

        Args:
            rank, token: what the process registers with. If it had not come to know its member
                id, the monitor claims its first place for it, so that the others do not wait
                for a process that will never come.
            member: its id; -1 if it was not known.
            fault: what is known of its end; the member is filled in.
        """
        if member < 0:
            registered = await self.register(rank, token)
            asked = (j.member for j in await self.joiners() if j.token == token)
            member = next(asked, -1) if registered is None else registered
        if member < 0:
            return  # a newcomer that had not asked yet: nobody knows of it
        fault = dataclasses.replace(fault, member=member)
        await self.report_lost(LostRecord(member, fault.cause), fault.iteration, fault)

    async def ledger(self) -> list[LostRecord]:
        """Everyone that is out of the job, in order."""
        return [LostRecord(**record) for record in lines(await self.link.read(barrier.LEDGER))]

    # -- between two iterations --------------------------------------------------------------

    async def roster(self, iteration: int) -> tuple[dict[int, int], int]:
        """Who stands at which rank in an iteration, and its world size, as said at its start."""
        places: dict[int, int] = {}
        world_size = 0
        for member, said in (await barrier.arrivals(self.link, f"start/{iteration}")).items():
            places[said["rank"]] = member
            world_size = max(world_size, said["world_size"])
        return places, world_size

    async def propose(self, iteration: int, *, grow: bool) -> ViewRecord:
        """Decides the view of `iteration`, or learns what was decided before."""
        roster, world_size = await self.roster(iteration - 1)
        before = await self.view(iteration - 1)
        if not roster and before is not None:  # nobody lived to the start: places stand as decided
            roster = {r: m for r, m in enumerate(before.slots()) if m is not None}
            world_size = len(before.slots())
        joiners = await self.joiners() if grow else []
        lost = await barrier.lost_members(self.link)
        mine = decide(iteration, roster, world_size, lost, joiners)
        record = ViewRecord.decode(await self.link.claim(f"view/{iteration}", mine.encode()))
        if record == mine:
            await self.link.put("current", str(iteration).encode())
        return record

    async def say_goodbye(self, member: int, iteration: int) -> None:
        """This member needs the store no longer."""
        view = await self.view(iteration)
        if view is not None:
            await barrier.arrive(self.link, "goodbye", member, view.expected)

    async def forget(self, iteration: int) -> None:
        """Deletes the keys of an iteration that nobody can be in any more.

        An empty view stays, and how the iteration ended: a process that slept through several
        iterations must not decide this one anew, nor wait for its end.
        """
        if iteration < 0:
            return
        await self.link.put(f"view/{iteration}", ViewRecord(iteration, ()).encode())
        for name in ("start", "term"):
            for part in ("arrived", "count", "done"):
                await self.link.delete(f"{name}/{iteration}/{part}")
        for key in ("done", "fault", "store"):
            await self.link.delete(f"{key}/{iteration}")

    async def end_of_job(self) -> LostRecord | None:
        """The record of the member that ended the whole job, if one did."""
        return next((record for record in await self.ledger() if record.ends_job), None)
