"""How members agree on the end of an iteration, on lost members, and on what follows.

Keys of iteration k (under the prefix of one call):

    decision/k/n  record n of the decision with which the iteration starts    first claim wins
    values/k      barrier before the rank assignment, if that needs values of other ranks
    start/k       barrier before the function
    over/k        how the iteration ended: restart | completed | moved (`moves`),  first claim wins;
                  covered by read leases (`replicated.read_leases`)
    done/k        the number of members that have returned from the function
    idle/k        the number of members that wait for others in the function
    fault/k       log of the faults
    term/k        barrier after all members have left the function
    resume/k      the pause before iteration k is over
    links/k       the launchers know which links between hosts are broken
    agrees/k      the ranks can agree on a last step (`moves`)

and of the whole call: `rules` (the arguments on which decisions depend), `ledger` (members lost for
good), `joins` (requests to join), `current` (a recent k, for joiners), `goodbye` (a barrier that
only the host of the store waits for), `stop` (a request to stop the job, the first claim wins),
`stop-signals` (for the launcher: those that are such requests, and the exit code of the job),
`last-save` (for the launcher: the save for the stop has begun), `stopped` (what the stop has
saved), `size` (for the launcher: the ranks that are there, and needed, while a restart is held),
`progress` (for the launcher: the last iteration that made progress), `read-lease/H` (host H asks
for one), `no-page` (a rank cannot use the page of a launcher on one host), `claim/R` (who
registered as rank R), `killed/P` (why its monitor kills process P, and why its replacement does not
count). Two keys have no prefix: `outlast/gone`, the ranks that the launcher does not replace, and
`outlast/suspected-link` (see `records`).

Why one key `over/k`: "all have completed" and "one has failed" can happen at the same moment. The
store orders the two claims, and every member follows the one that won.

Why each loss is recorded in this order (`report_lost`): ledger, then claims of `over`, then checks
of barriers and decisions, for every iteration whose view includes the member, from its last known
one on. If a decision includes a member whose loss is in the ledger by then, the decider did not see
it, so the ledger entry came after that read; the arrivals at `start` of the new view come after the
decision and read the ledger again, so the barrier completes without the lost member, and its
missing rank causes the next restart.

Why the loss of a host leaves no gap (`report_ended`). A process that dies is reported by its
monitor; a host that dies takes the monitors with it, and the launcher of another host reports all
of its processes. Each process registers, by a claim of its rank or a request to join, with a token
that names its host (`records.process_token`). So one operation says that the member exists and on
which host. The reporter claims the ranks of the host too: either the claim of a process is there,
which it reports if the process is of the host; or the rank is its own, and counts as that of a lost
member. A claim or request that comes from the host after the reporter has looked is refused by the
store, which has closed itself to the host before the loss is known.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Collection, Sequence

from outlast.coordination import barrier
from outlast.coordination.deciding import COMPLETED, GONE, MOVED, RESTART, Decisions, decision_key
from outlast.coordination.decision import (
    Decision,
    Joiner,
    Reached,
    ViewRecord,
    encode_record,
    forgotten,
)
from outlast.coordination.records import (
    ENDED,
    LostRecord,
    SizeRecord,
    StopRecord,
    belongs_to,
    to_line,
)
from outlast.events.fault_record import FaultRecord
from outlast.events.first_cause import first_cause
from outlast.events.restart_causes import HUNG, RestartCount

__all__ = ["COMPLETED", "MOVED", "RESTART", "MembershipProtocol", "decision_key", "resume_key"]

_KEPT = 8
"""Iterations whose keys are kept."""


def resume_key(iteration: int) -> str:
    """The key that ends the pause before an iteration."""
    return f"resume/{iteration}"


class MembershipProtocol(Decisions):
    """The membership protocol of one call, for one process: what it adds to the facts."""

    async def register(self, rank: int, token: str) -> int | None:
        """Claims `rank` of the first view; returns the member id, or `None` if it was claimed
        before: then this process must ask to join.

        The monitor of this process knows `token` before the claim, so that it can tell a death
        right after the claim from a rank that was never claimed.
        """
        return rank if await self._claim(rank, token) == token else None

    async def _claim(self, rank: int, token: str) -> str | None:
        """Claims `rank` of the first view; the token that has it, `None` if there is none."""
        if not 0 <= rank < self.world_size:
            await self.rules()
            return None
        # A replacement finds its rank claimed; then the rules are there, too.
        held, rules = await self.link.read_all(f"claim/{rank}", "rules")
        self.know_rules(rules)
        if held is not None:
            return held.decode()
        await self.rules()
        # The view first: once a rank is claimed, there is a view in which its loss can be reported.
        first = Decision(ViewRecord(0, tuple(range(self.world_size))))
        await self.link.claim(decision_key(0, 0), encode_record(first))
        return (await self.link.claim(f"claim/{rank}", token.encode())).decode()

    async def ask_to_join(self, preferred: int, token: str, succeeds: int = -1) -> int:
        """Asks to join, or to succeed a member; returns the new member id. The monitor of this
        process finds the request by `token`, if the process dies before its monitor knows the id.
        """
        member = self.world_size - 1 + await self.link.add("ids", 1)
        await self.link.append("joins", to_line(Joiner(member, preferred, token, succeeds)))
        return member

    async def leave(
        self,
        iteration: int,
        member: int,
        expected: frozenset[int],
        most: dict[str, int],
        *,
        keeps: bool = False,
    ) -> Decision | None:
        """Records that a member has left the iteration, and whether it keeps something to save. The
        last one decides what follows, and returns the decision.
        """
        term, own = f"term/{iteration}", {"keeps": keeps or None}
        if await barrier.record_arrival(self.link, term, member, expected, most, **own):
            record = await self.decide(iteration, Reached.ARRIVED)
            return record if isinstance(record, Decision) else None
        return None

    async def end(self, iteration: int, how: bytes) -> bytes:
        """Ends the iteration, unless it has ended already; returns how it ended."""
        return await self.link.claim(f"over/{iteration}", how)

    async def ask_read_lease(self, host: str) -> None:
        """Asks for a read lease of this host: see `replicated.read_leases`."""
        await self.link.put(f"read-lease/{host}", b"1")

    async def lack_page(self) -> None:
        """Records that this rank tells nobody of an abort in memory: see `inprocess.read_lease`."""
        await self.link.put("no-page", b"1")

    async def lacks_page(self) -> bool:
        return await self.link.read("no-page") is not None

    async def finish(self, iteration: int, members: int) -> None:
        """This member has returned from the function; the last of `members` completes the job.

        Lost members count too: a loss restarts the iteration, unless the member had returned.
        """
        if await self.link.add(f"done/{iteration}", 1) >= members:
            await self.end(iteration, COMPLETED)

    async def count_idle(self, iteration: int, amount: int, members: int) -> bool:
        """Counts members that wait; returns whether all `members` wait or have returned."""
        idle = await self.link.add(f"idle/{iteration}", amount)
        return idle + await self.link.add(f"done/{iteration}", 0) >= members

    async def report_fault(self, fault: FaultRecord) -> None:
        """Records a fault of a member that stays in the job, and ends the iteration."""
        await self.link.append(f"fault/{fault.iteration}", to_line(fault))
        await self.end(fault.iteration, RESTART)

    async def report_lost(
        self, lost: LostRecord, iteration: int, fault: FaultRecord | None = None
    ) -> None:
        """Records that a member has left the job, for `fault` if that is one of the iteration, its
        last known one (-1: none is known); wakes all members that may wait for it.
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
        await self.wake_for_lost(iteration, failed, discarded)

    async def report_killed(self, token: str, rank: int, member: int, fault: FaultRecord) -> None:
        """Records that the process with `token` ended without leaving the job; its monitor calls
        this. `member` is its ID, -1 if it had none; `fault` what is known of its end.
        """
        if member < 0:
            await self.report_ended(token, range(rank, rank + 1), fault)
        else:
            fault = dataclasses.replace(fault, member=member)
            await self.report_lost(LostRecord(member, fault.cause), fault.iteration, fault)

    async def report_ended(self, owner: str, ranks: range, fault: FaultRecord) -> frozenset[int]:
        """Records all members of an owner as lost: of the process with that token, or of the host
        with that ID. Returns those that this call has recorded. It may be called again, also by
        another process: a member that is in the ledger already is left out.

        If no process has claimed one of `ranks`, as which those of the owner were started, the
        owner gets it: the others do not wait for a process that will never arrive. `fault` is what
        is known of the end, without iteration, member and rank.
        """
        await self.link.put(f"gone/{owner}", b"1")
        # The first members were started as the ranks that are their IDs.
        members = {
            rank: rank for rank in ranks if belongs_to(await self._claim(rank, owner) or "", owner)
        }
        for joiner in await self.joiners():
            if belongs_to(joiner.token, owner):
                members[joiner.member] = joiner.preferred
        known = {record.member: record.discarded for record in await self.ledger()}
        lost = {member: rank for member, rank in sorted(members.items()) if member not in known}
        iteration = await self.current()
        if lost:
            faults = [
                dataclasses.replace(fault, iteration=iteration, member=member, rank=rank)
                for member, rank in lost.items()
            ]
            losses = [LostRecord(member, fault.cause) for member in lost]
            await self.report_all_lost(losses, iteration, faults)
        # Another reporter may have died between its entries in the ledger and this.
        before = frozenset(members.keys() & known.keys())
        if before:
            discarded = frozenset(member for member in before if known[member])
            await self.wake_for_lost(iteration, before - discarded, discarded)
        return frozenset(lost)

    async def wake_for_lost(
        self, iteration: int, failed: frozenset[int], discarded: frozenset[int] = frozenset()
    ) -> None:
        """Wakes all that may wait for members that are in the ledger, from `iteration` on."""
        members = failed | discarded
        at = await self.current() if iteration < 0 else iteration
        views = []
        while (view := await self.view(at)) is not None:
            if members & view.expected:
                views.append(view)
            at += 1
        for view in views:
            if failed & view.expected:
                await self.end(view.iteration, RESTART)
                await self.link.put(resume_key(view.iteration), b"1")
            await barrier.complete(self.link, f"start/{view.iteration}", view.expected)
            await self.decide(view.iteration, Reached.LOST)
        for view in views:  # at last: the store may end with the last goodbye
            await barrier.complete(self.link, "goodbye", view.expected)

    async def announce_kill(self, process: str, fault: FaultRecord, why: str) -> None:
        """Records, for the launcher, that a monitor is about to kill its process with this fault,
        and whether that is a consequence: another rank had ended the iteration before by a fault of
        its own. Not after a hang, in which a rank may also fail in what the interrupt has it do.
        """
        faults = await self.faults(fault.iteration)
        first = next((each for each in faults if not each.may_be_harmless), fault)
        own = first.member == fault.member or any(f.interruption == HUNG for f in faults)
        uncounted = "" if own else f"rank {first.rank} had failed first"
        await self.link.put(f"{ENDED}{process}", f"{why}\n{uncounted}".encode())

    async def say_goodbye(self, member: int, iteration: int) -> None:
        view = await self.view(iteration)
        if view is not None:
            await barrier.arrive(self.link, "goodbye", member, view.expected)

    async def forget_before(self, iteration: int) -> None:
        """Deletes the keys of iterations that no member can still be in when rank 0 is in the
        function at `iteration`. Recent ones are kept: a joiner may still be reading their keys.

        An empty view and the end of each iteration stay, about 100 bytes: a process that was
        stopped for several iterations must neither decide this one again nor wait for its end.
        """
        iteration -= _KEPT
        while iteration >= 0:
            decision = await self.decision(iteration)
            if decision is None or not decision.view.expected:
                return  # and those before it are forgotten too
            number = 0
            while await self.link.read(decision_key(iteration, number)) is not None:
                await self.link.put(decision_key(iteration, number), forgotten(iteration))
                number += 1
            for name in ("start", "term", "values"):
                for part in ("arrived", "count", "done"):
                    await self.link.delete(f"{name}/{iteration}/{part}")
            for key in ("done", "idle", "fault", "resume", "links", "agrees"):
                await self.link.delete(f"{key}/{iteration}")
            iteration -= 1

    async def request_stop(self, stop: StopRecord) -> None:
        """Records a request to stop the job; the first one counts. It outlives the member that
        recorded it: every later decision reads it, and a restart that is held goes on.
        """
        await self.link.claim("stop", to_line(stop))
        # Members that do not see the request yet may plan a pause now: it is over before it begins.
        newest = await self.current()
        for iteration in (newest, newest + 1):
            await self.link.put(resume_key(iteration), b"1")
        await self.decide(newest, Reached.ASKED)

    async def note_stop_signals(self, numbers: Collection[int], exit_code: int) -> None:
        """Records, for the launcher, the signals that are requests to stop, as long as they are."""
        await self.link.put("stop-signals", json.dumps([*numbers, exit_code]).encode())

    async def request_stop_by(self, number: int, reason: str) -> None:
        """`request_stop`, if the signal is one; by the launcher, before it forwards the signal. So
        every decision after a loss since then knows of the request: a rank that waits in a
        collective for the lost one handles the signal only when that has ended.
        """
        *numbers, exit_code = json.loads(await self.link.read("stop-signals") or b"[0]")
        if number in numbers:
            await self.request_stop(StopRecord(reason, exit_code))

    async def finish_stop(self, done: str) -> None:
        """Records that all that the stop requires has been done. A member calls this before it
        leaves, so its loss, which ends the iteration of the others, is seen after this record.
        """
        await self.link.claim("stopped", done.encode())

    async def announce_last_save(self, limit_s: float) -> None:
        """Tells the launcher that the save for a stop has begun, and how long it may take."""
        await self.link.put("last-save", str(limit_s).encode())

    async def last_save(self) -> float | None:
        data = await self.link.read("last-save")
        return None if data is None else float(data)

    async def give_up(self, ranks: frozenset[int]) -> None:
        """Records ranks, as the launcher numbers them, that will not be replaced. By launchers."""
        await self.link.at("").append(GONE, json.dumps(sorted(ranks)).encode() + b"\n")
        await self.decide(await self.current(), Reached.ASKED)

    async def take_back(self, ranks: frozenset[int]) -> None:
        """Records that a host has taken the place of ranks: their next loss is waited for."""
        await self.link.at("").append(GONE, json.dumps({"back": sorted(ranks)}).encode() + b"\n")

    async def note_progress(self, iteration: int) -> None:
        """Records, for the launchers, that the training has come further than ever before."""
        await self.link.put("progress", str(iteration).encode())

    async def size(self) -> SizeRecord | None:
        """What the members of the last held restart need; `None` before the first one."""
        data = await self.link.read("size")
        return None if data is None else SizeRecord(**json.loads(data))

    async def links_known(self, iteration: int) -> None:
        """Records that the launchers know whether a broken link between two hosts has ended the
        iteration, and that the host that leaves for it is lost. Before that, the members would
        connect over that link again, in C++, where no interrupt arrives. No effect once the
        decision has been made: each launcher that begins to lead calls this.
        """
        if await self.current() == iteration:
            await self.link.put(f"links/{iteration}", b"1")
            await self.decide(iteration, Reached.ASKED)

    async def restart_counts(self) -> tuple[RestartCount, ...]:
        newest = await self.decision(await self.current())
        return () if newest is None else newest.history.restarts

    async def first_causes(self, since: int) -> tuple[int, list[tuple[str, FaultRecord]]]:
        """The current iteration, and the first causes of the restarts that led to the iterations
        after `since`, if their decisions are kept; each with the token of its process or host.
        """
        newest = await self.current()
        found = []
        for iteration in range(max(since, newest - _KEPT) + 1, newest + 1):
            decision = await self.decision(iteration)
            if decision is not None and decision.cause is not None:
                cause = decision.cause
                found.append((await self._token(cause.member), cause))
        return newest, found

    async def _token(self, member: int) -> str:
        """The token with which a member has registered; empty if it has not."""
        if (claim := await self.link.read(f"claim/{member}")) is not None:
            return claim.decode()
        return next((j.token for j in await self.joiners() if j.member == member), "")

    async def cause_of_end(self) -> FaultRecord | None:
        """The fault with which the members have ended the job; `None` if they have not."""
        newest = await self.current()
        decision = await self.decision(newest)
        if decision is not None and decision.history.cause is not None:
            return decision.history.cause
        if not any(record.ends_job for record in await self.ledger()):
            return None
        ended = newest
        if decision is not None and decision.ends:  # no iteration follows it
            ended -= 1
        before = await self.decision(ended)
        if before is not None and before.view.saves:  # its members only saved
            ended -= 1
        return first_cause(await self.faults(ended))
