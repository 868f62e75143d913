"""How members agree on the end of an iteration, on lost members, and on the next view.

Keys of iteration k (under the prefix of one call):

    view/k     the agreed `ViewRecord`                        first claim wins
    start/k    barrier before the function
    over/k     how the iteration ended: restart | completed   first claim wins
    done/k     the number of members that have returned from the function
    idle/k     the number of members that wait for others in the function
    fault/k    log of the faults
    store/k    the address of the iteration's own store, for the function
    term/k     barrier after all members have left the function
    history/k  the faults before iteration k                  first claim wins
    resume/k   the pause before iteration k is over
    suspect/k  the number of members that suspect a broken link between two hosts
    links/k    the launchers know which links are broken

and of the whole call: `ledger` (members lost for good), `joins` (requests to join), `current` (a
recent k, for joiners), `goodbye` (a barrier that only the host of the store waits for), `stop` (a
request to stop the job, the first claim wins), `last-save` (for the launcher: the save for the stop
has begun), `stopped` (what the stop has saved), `size` (for the launcher: the ranks that are there,
and needed, while a restart is held), `claim/R` (who registered as rank R), `killed/P` (why its
monitor kills process P). Two keys have no prefix: `outlast/gone`, the ranks that the
launcher does not replace, and `outlast/suspected-link` (see `records`).

Why one key `over/k`: "all have completed" and "one has failed" can happen at the same moment. The
store orders the two claims, and every member follows the one that won.

Why each loss is recorded in this order (`report_lost`): ledger, then claims of `over`, then checks
of barriers, for every iteration whose view includes the member, from its last known one on. The
member that decides a view reads the ledger before. If the decision includes a member whose loss is
in the ledger by then, the decider did not see it, so the ledger entry came after that read; the
arrivals at `start` of the new view come after the decision and read the ledger again, so the
barrier completes without the lost member, and its missing rank causes the next restart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

from outlast.coordination import barrier
from outlast.coordination.ops import Link
from outlast.coordination.records import (
    SUSPECTED_LINK,
    FaultRecord,
    LostRecord,
    SizeRecord,
    StopRecord,
    first_cause,
    lines,
    to_line,
)
from outlast.coordination.stores.store import KeyTimeout
from outlast.coordination.view import Joiner, ViewRecord, decide
from outlast.events.restart_causes import RestartCount, decode_counts

RESTART = b"restart"
COMPLETED = b"completed"
_GONE = "outlast/gone"
_WAKES = 64
"""So many of the keys that wake holders are kept, see `wake_holders`."""


def resume_key(iteration: int) -> str:
    """The key that ends the pause before an iteration."""
    return f"resume/{iteration}"


class MembershipProtocol:
    """The membership protocol of one call, for one member. Its only state is the link. `world_size`
    is the number of members at the start of the job.
    """

    def __init__(self, link: Link, world_size: int) -> None:
        self.link, self.world_size = link, world_size

    async def register(self, rank: int, token: str) -> int | None:
        """Claims `rank` of the first view; returns the member id, or `None` if it was claimed
        before: then this process must ask to join.

        The monitor of this process knows `token` before the claim, so that it can tell a death
        right after the claim from a rank that was never claimed.
        """
        if not 0 <= rank < self.world_size:
            return None
        # The view first: once a rank is claimed, there is a view in which its loss can be reported.
        first = ViewRecord(0, tuple(range(self.world_size)))
        await self.link.claim("view/0", first.encode())
        held = await self.link.claim(f"claim/{rank}", token.encode())
        return rank if held == token.encode() else None

    async def ask_to_join(self, preferred: int, token: str) -> int:
        """Asks to join; returns the new member id. The monitor of this process finds the request
        by `token`, if the process dies before its monitor knows the id.
        """
        member = self.world_size - 1 + await self.link.add("ids", 1)
        await self.link.append("joins", to_line(Joiner(member, preferred, token)))
        await self.wake_holders()
        return member

    async def wake_holders(self) -> None:
        """Wakes the members that hold a restart for replacements: one has asked to join, the view
        is decided, the job was told to stop, or the launcher gave up a rank. A holder reads
        `joined`, then looks, then waits for the next number; what it did not see was written after
        its look, and so under that number or a later one.

        Every member of every restart writes such a key, so old ones are deleted. A wait that has
        begun is answered when its key is set, even if it is deleted then; a holder misses it only
        if there were `_WAKES` more between its read and its wait. Its backstop looks again then.
        """
        number = await self.link.add("joined", 1)
        await self.link.put(f"joined/{number}", b"1")
        if number > _WAKES:
            await self.link.delete(f"joined/{number - _WAKES}")

    async def joiners(self) -> list[Joiner]:
        """All processes that ever asked to join, in that order."""
        return [Joiner(**record) for record in lines(await self.link.read("joins"))]

    async def current(self) -> int:
        """The newest iteration whose view is decided."""
        iteration = int(await self.link.read("current") or b"0")
        while await self.view(iteration + 1) is not None:
            iteration += 1
        return iteration

    async def view(self, iteration: int) -> ViewRecord | None:
        """The decided view; `None` before the decision."""
        data = await self.link.read(f"view/{iteration}")
        return None if data is None else ViewRecord.decode(data)

    async def over(self, iteration: int) -> bytes | None:
        """How the iteration ended (`RESTART`, `COMPLETED`); `None` while it runs."""
        return await self.link.read(f"over/{iteration}")

    async def end(self, iteration: int, how: bytes) -> bytes:
        """Ends the iteration, unless it has ended already; returns how it ended."""
        return await self.link.claim(f"over/{iteration}", how)

    async def finish(self, iteration: int, members: int) -> None:
        """This member has returned from the function; the last of `members` completes the job.

        Lost members count too: a loss restarts the iteration, unless the member had returned
        before it was lost.
        """
        if await self.link.add(f"done/{iteration}", 1) >= members:
            await self.end(iteration, COMPLETED)

    async def count_idle(self, iteration: int, amount: int, members: int) -> bool:
        """Counts members that wait for others; returns whether all of `members` wait, or have
        returned from the function.
        """
        idle = await self.link.add(f"idle/{iteration}", amount)
        return idle + await self.link.add(f"done/{iteration}", 0) >= members

    async def faults(self, iteration: int) -> list[FaultRecord]:
        """The faults of an iteration, in the order in which they were reported."""
        data = await self.link.read(f"fault/{iteration}")
        return [FaultRecord(**record) for record in lines(data)]

    async def report_fault(self, fault: FaultRecord) -> None:
        """Records a fault of a member that stays in the job, and ends the iteration."""
        await self.link.append(f"fault/{fault.iteration}", to_line(fault))
        await self.end(fault.iteration, RESTART)

    async def report_lost(
        self, lost: LostRecord, iteration: int, fault: FaultRecord | None = None
    ) -> None:
        """Records that a member has left the job; wakes all members that may wait for it.

        Args:
            lost: the member, and why.
            iteration: its last known one; -1 if none is known.
            fault: the cause of its death, if that is a fault of the iteration.
        """
        await self.report_all_lost([lost], iteration, [] if fault is None else [fault])

    async def report_all_lost(
        self, losses: Sequence[LostRecord], iteration: int, faults: Sequence[FaultRecord]
    ) -> None:
        """`report_lost` of several members at once, with as many operations as for one."""
        for at, group in itertools.groupby(faults, lambda fault: fault.iteration):
            await self.link.append(f"fault/{at}", b"".join(map(to_line, group)))
        await self.link.append(barrier.LEDGER, b"".join(map(to_line, losses)))
        failed = frozenset(lost.member for lost in losses if not lost.discarded)
        discarded = frozenset(lost.member for lost in losses if lost.discarded)
        if failed:
            await self.wake_holders()  # one of them may be mistaken for lost, and has to leave
        await self.wake_for_lost(iteration, failed, discarded)

    async def wake_for_lost(
        self, iteration: int, failed: frozenset[int], discarded: frozenset[int] = frozenset()
    ) -> None:
        """Wakes all that may wait for members that are in the ledger, from `iteration` on."""
        members = failed | discarded
        at = await self.current() if iteration < 0 else iteration
        views = []
        while (view := await self.view(at)) is not None:
            if members & view.expected:
                if failed & view.expected:
                    await self.end(at, RESTART)
                    await self.link.put(resume_key(at), b"1")
                await barrier.check(self.link, f"start/{at}", view.expected)
                await barrier.check(self.link, f"term/{at}", view.expected)
                views.append(view)
            at += 1
        for view in views:  # at last: the store may end with the last goodbye
            await barrier.check(self.link, "goodbye", view.expected)

    async def report_killed(self, rank: int, token: str, member: int, fault: FaultRecord) -> None:
        """Records that a process ended without leaving the job; called by its monitor.

        Args:
            rank, token: with which the process registers. If it did not know its member id yet,
                the monitor claims its rank of the first view for it, so that the others do not
                wait for a process that will never arrive.
            member: its id; -1 if it is not known.
            fault: what is known of its end; the member is filled in.
        """
        if member < 0:
            registered = await self.register(rank, token)
            asked = (j.member for j in await self.joiners() if j.token == token)
            member = next(asked, -1) if registered is None else registered
        if member < 0:
            return  # a joiner that had not asked yet: no member waits for it
        fault = dataclasses.replace(fault, member=member)
        await self.report_lost(LostRecord(member, fault.cause), fault.iteration, fault)

    async def announce_kill(self, process: str, why: str) -> None:
        """Records that a monitor is about to kill its process, whose name (`process_name`) the
        launcher knows.
        """
        await self.link.put(f"killed/{process}", why.encode())

    async def announced_kill(self, process: str) -> str:
        """Why its monitor has killed this process; empty if it has not."""
        return (await self.link.read(f"killed/{process}") or b"").decode()

    async def is_registered(self, rank: int) -> bool:
        """Whether a process has registered as this rank, or a reporter of its loss for it."""
        return await self.link.read(f"claim/{rank}") is not None

    async def ledger(self) -> list[LostRecord]:
        """All members that have left the job, in order."""
        return [LostRecord(**record) for record in lines(await self.link.read(barrier.LEDGER))]

    async def roster(self, iteration: int) -> tuple[dict[int, int], int]:
        """The member at each rank of an iteration, and its world size, as reported at its start."""
        places: dict[int, int] = {}
        world_size = 0
        for member, said in (await barrier.arrivals(self.link, f"start/{iteration}")).items():
            places[said["rank"]] = member
            world_size = max(world_size, said["world_size"])
        return places, world_size

    async def propose(self, iteration: int, *, grow: bool) -> ViewRecord:
        """Decides the view of `iteration`, or returns the view that was decided before."""
        roster, world_size = await self.roster(iteration - 1)
        before = await self.view(iteration - 1)
        if not roster and before is not None:  # no member reached the start: slots as decided
            roster = {r: m for r, m in enumerate(before.slots()) if m is not None}
            world_size = len(before.slots())
        joiners = await self.joiners() if grow else []
        lost = await barrier.lost_members(self.link)
        mine = decide(iteration, roster, world_size, lost, joiners)
        stop = await self.stop_request()
        if stop is not None:
            mine = mine.with_stop(stop, before)
        record = ViewRecord.decode(await self.link.claim(f"view/{iteration}", mine.encode()))
        if record == mine:
            await self.link.put("current", str(iteration).encode())
        return record

    async def say_goodbye(self, member: int, iteration: int) -> None:
        """Records that this member no longer needs the store."""
        view = await self.view(iteration)
        if view is not None:
            await barrier.arrive(self.link, "goodbye", member, view.expected)

    async def forget(self, iteration: int) -> None:
        """Deletes the keys of an iteration that no member can still be in, and of those before it:
        an iteration that ends before the function is called forgets none.

        An empty view and the end of the iteration stay, about 130 bytes: a process that was stopped
        for several iterations must neither decide this one again nor wait for its end.
        """
        while iteration >= 0:
            view = await self.view(iteration)
            if view is None or not view.expected:
                return  # and those before it are forgotten too
            await self.link.put(f"view/{iteration}", ViewRecord(iteration, ()).encode())
            for name in ("start", "term"):
                for part in ("arrived", "count", "done"):
                    await self.link.delete(f"{name}/{iteration}/{part}")
            for key in ("done", "idle", "fault", "history", "resume", "suspect", "links", "store"):
                await self.link.delete(f"{key}/{iteration}")
            iteration -= 1

    async def request_stop(self, stop: StopRecord) -> None:
        """Records a request to stop the job; the first one counts. It outlives the member that
        recorded it: every later decision reads it, and a restart that is held goes on.
        """
        await self.link.claim("stop", to_line(stop))
        await self.wake_holders()
        # Members that do not see the request yet may plan a pause now: it is over before it begins.
        newest = await self.current()
        for iteration in (newest, newest + 1):
            await self.link.put(resume_key(iteration), b"1")

    async def finish_stop(self, done: str) -> None:
        """Records that all that the stop requires has been done. A member calls this before it
        leaves, so its loss, which ends the iteration of the others, is seen after this record.
        """
        await self.link.claim("stopped", done.encode())

    async def announce_last_save(self, limit_s: float) -> None:
        """Tells the launcher that the save for a stop has begun, and how long it may take."""
        await self.link.put("last-save", str(limit_s).encode())

    async def last_save(self) -> float | None:
        """How long the save for a stop may take, in seconds; `None` before it has begun."""
        data = await self.link.read("last-save")
        return None if data is None else float(data)

    async def stop_request(self) -> StopRecord | None:
        """The request to stop the job, if there is one."""
        data = await self.link.read("stop")
        if data is None:
            return None
        done = await self.link.read("stopped") or b""
        return dataclasses.replace(StopRecord(**json.loads(data)), done=done.decode())

    async def reporter_of_stop(self, member: int) -> int:
        """The member that tells the user how the stop ended: the first to ask."""
        return int(await self.link.claim("stop-reporter", str(member).encode()))

    async def give_up(self, ranks: frozenset[int]) -> None:
        """Records ranks, as numbered by the launcher, that will not be replaced: only launchers
        call this. On many hosts, each one does so for its own ranks.
        """
        await Link().append(_GONE, json.dumps(sorted(ranks)).encode() + b"\n")
        await self.wake_holders()

    async def take_back(self, ranks: frozenset[int]) -> None:
        """Records that ranks have processes again: a host has taken their place. The next time that
        they are lost, they are waited for.
        """
        await Link().append(_GONE, json.dumps({"back": sorted(ranks)}).encode() + b"\n")

    async def given_up(self) -> frozenset[int]:
        """The ranks that no launcher replaces; empty without a launcher that says so."""
        gone: set[int] = set()
        for line in (await Link().read(_GONE) or b"").splitlines():
            record = json.loads(line)
            if isinstance(record, dict):
                gone.difference_update(record["back"])
            else:
                gone.update(record)
        return frozenset(gone)

    async def tell_size(self, size: SizeRecord) -> None:
        """Tells the launchers what the members need that hold a restart for replacements."""
        await self.link.put("size", json.dumps(dataclasses.asdict(size)).encode())

    async def size(self) -> SizeRecord | None:
        """What the members of the last held restart need; `None` before the first one."""
        data = await self.link.read("size")
        return None if data is None else SizeRecord(**json.loads(data))

    async def await_links(self, iteration: int, cause: FaultRecord, limit_s: float) -> None:
        """Waits until the launchers know whether a broken link between two hosts has caused the end
        of the iteration, and the host that leaves for it is lost. Otherwise the members would
        connect over that link again, in C++, where no interrupt arrives.

        Args:
            limit_s: after it, the members go on: the one that was to tell the launchers may have
                died, or the job may be about to end.
        """
        view = await self.view(iteration)
        members = frozenset() if view is None else view.expected
        grows = any(joiner.member not in members for joiner in await self.joiners())
        if cause.may_be_harmless and grows:
            return  # connections broke because the job is made to grow
        if await self.stop_request() is not None:
            return
        key = f"links/{iteration}"
        if await self.link.add(f"suspect/{iteration}", 1) == 1:
            await Link().put(SUSPECTED_LINK, (self.link.prefix + key).encode())
        with contextlib.suppress(KeyTimeout):
            await self.link.wait_for(key, limit_s)

    async def restart_counts(self) -> tuple[RestartCount, ...]:
        """The restarts of this call by cause."""
        history = await self._newest_history()
        return () if history is None else decode_counts(history["restarts"])

    async def cause_of_end(self) -> FaultRecord | None:
        """The fault with which the members have ended the job; `None` if they have not."""
        history = await self._newest_history()
        if history is not None and history["cause"]:
            return FaultRecord(**history["cause"])
        if await self.end_of_job() is None:
            return None
        return first_cause(await self.faults(await self.current()))

    async def _newest_history(self) -> dict[str, Any] | None:
        newest = await self.current()
        data = await self.link.read(f"history/{newest + 1}")  # of a restart that ended the job
        data = data or await self.link.read(f"history/{newest}")
        return None if data is None else dict(json.loads(data))

    async def end_of_job(self) -> LostRecord | None:
        """The record of the member that ended the whole job; `None` if none did."""
        return next((record for record in await self.ledger() if record.ends_job), None)
