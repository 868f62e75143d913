"""Ranks that leave in order, the processes that succeed them, and those that join a job that grows.

A launcher starts the successors of the ranks of a host that is to leave, while these train. A
successor asks to join and names the member whose place it takes (`Joiner.succeeds`). It waits until
that member has left: it ends no iteration, and no decision counts it before. The last successor to
ask requests that the members leave (`request_leave`); where nobody succeeds them, a launcher does.

A request is a line of the log `leaves`, and holds until its members are out of the job. Rank 0 of
each iteration reads the log when the iteration begins, and then waits for the next line: the key
`leave/K/N` is set once the log has more than N lines in iteration K. A request that a fault
overtakes is therefore read again in the next iteration. The ranks then agree on a last step
(`elastic.stop_agreement`). After it, the members leave with an entry in the ledger that is no fault
(`LostRecord.moved`), which ends the iteration.

A rank that dies before that is replaced by its launcher or by its successor, whichever claims
`heir/M` first, M being its member: two processes of one rank would be one too many. A successor
that comes second waits for the replacement, or until `gone/H` says that its host H is lost.

A process that joins in addition to all ranks requests such a step in the same way, where the ranks
can agree on one (`join_after_step`): from the time rank 0 begins to wait for requests in the
iteration, which the key `agrees/K` tells, after the ranks have restored their state. Before that,
and without a `Job`, it ends the iteration at once; no step is made meanwhile that others lack. It
does not wait forever: it is admitted after whatever ends the iteration, also a fault before that
step, and a job that is over ends the call, or rank 0 reads the log again for the next `Job`.
"""

from __future__ import annotations

import dataclasses

import msgspec

from outlast.coordination.decision import ViewRecord
from outlast.coordination.membership import COMPLETED, MembershipProtocol
from outlast.coordination.records import belongs_to, lines, to_line
from outlast.coordination.stores.store import KeyTimeout

_LOG, _LEAST = "leaves", "least"
_AGAIN_S = 1.0


@dataclasses.dataclass(frozen=True)
class LeaveRequest:
    """Members that are to leave, or to join, after a common step. `saves`: all save there before,
    as nobody is ready to take the state from those that leave.
    """

    members: tuple[int, ...]
    reason: str
    succeeded: bool = True  # other processes take their places at once
    saves: bool = False
    joiners: tuple[int, ...] = ()


async def holder(
    membership: MembershipProtocol, rank: int, host: str, *, newest: bool = False
) -> int:
    """The member that was started as this rank on this host, and is in the job; -1 if none is, or
    the `newest` one that was.
    """
    lost = {record.member for record in await membership.ledger()}
    claim = await membership.link.read(f"claim/{rank}") or b""
    found = [rank] if belongs_to(claim.decode(), host) else []
    for joiner in await membership.joiners():
        admitted = joiner.succeeds < 0 or joiner.succeeds in lost
        if joiner.preferred == rank and admitted and belongs_to(joiner.token, host):
            found.append(joiner.member)
    there = [member for member in found if member not in lost]
    return (there or (found if newest else []) or [-1])[-1]


async def succeeded(membership: MembershipProtocol, rank: int, host: str, own: str) -> int:
    """The member whose place a process of the host `own` takes, which was started as a rank of
    another one. If it dies before this call, and the launcher of its host has been first to say so
    (`replaces`), that starts a replacement, and this waits for it, or for the loss of the host.
    """
    while True:
        member = await holder(membership, rank, host, newest=True)
        key = f"heir/{member}"
        if own == host or await membership.link.claim(key, own.encode()) != host.encode():
            return member
        try:
            await membership.link.wait_for(f"gone/{host}", _AGAIN_S)
        except KeyTimeout:
            k = await membership.current()
            after = await membership.decision(k + 1)
            if await membership.over(k) == COMPLETED or (after is not None and after.ends):
                return member  # the job is over, as it will find out
        else:
            return await holder(membership, rank, host, newest=True)


async def replaces(membership: MembershipProtocol, rank: int, host: str) -> bool:
    """Called by the launcher of a host that leaves, when one of its ranks has died: whether it is
    to replace that. It is not once a successor has begun to ask.
    """
    member = await holder(membership, rank, host, newest=True)
    return await membership.link.claim(f"heir/{member}", host.encode()) == host.encode()


async def holders(membership: MembershipProtocol, ranks: range, host: str) -> tuple[int, ...]:
    """The members of these ranks on this host."""
    found = [await holder(membership, rank, host) for rank in ranks]
    return tuple(member for member in found if member >= 0)


async def train(membership: MembershipProtocol, ranks: range, host: str) -> bool:
    """Whether all of these ranks are in the job, on this host, and none was asked to leave."""
    members = await holders(membership, ranks, host)
    asked = {member for each in await _requests(membership) for member in each.members}
    return len(members) == len(ranks) and not asked.intersection(members)


async def succeed(membership: MembershipProtocol, ranks: range, host: str, reason: str) -> None:
    """Called by a successor that has asked: requests that the members of these ranks on this host
    leave, if each has a successor by now.
    """
    members = await holders(membership, ranks, host)
    lost = {record.member for record in await membership.ledger()}
    asked = {j.succeeds for j in await membership.joiners() if j.member not in lost}
    if members and asked.issuperset(members):
        await request_leave(membership, LeaveRequest(members, reason))


async def join_after_step(
    membership: MembershipProtocol, iteration: int, view: ViewRecord, member: int
) -> bool:
    """Called by a joiner: requests that the iteration ends after a common step. `False` if it is to
    end at once: its ranks agree on no step, or the joiner replaces one, whose loss is not known yet
    if it is still in the view.
    """
    if await membership.link.read(f"agrees/{iteration}") is None:
        return False
    started_as = {joiner.member: joiner.preferred for joiner in await membership.joiners()}
    lost = {record.member for record in await membership.ledger()}
    rank = started_as[member]
    if view.expected & lost or rank in {started_as.get(m, m) for m in view.expected}:
        return False
    await request_leave(membership, LeaveRequest((), f"rank {rank} joins", joiners=(member,)))
    return True


async def begin_to_wait(membership: MembershipProtocol, iteration: int, ranks: int) -> None:
    """Tells joiners that the ranks of the iteration can agree on a step from now on; and the
    launchers how many ranks the function needs at least.
    """
    await membership.link.put(f"agrees/{iteration}", b"1")
    await membership.link.put(_LEAST, str(ranks).encode())


async def least(membership: MembershipProtocol) -> int:
    """How many ranks the function needs at least; -1 if it has not said so."""
    return int(await membership.link.read(_LEAST) or b"-1")


async def request_leave(membership: MembershipProtocol, request: LeaveRequest) -> None:
    """Requests that members leave, or join; may be called again."""
    await membership.link.append(_LOG, to_line(request))
    iteration, count = await membership.current(), len(await _requests(membership))
    for number in range(count):
        await membership.link.put(leave_key(iteration, number), b"1")


async def requests(
    membership: MembershipProtocol, present: frozenset[int]
) -> tuple[int, LeaveRequest | None]:
    """How many requests there were so far, and one for all that are open: of members that leave and
    are still present, and of those that join and are not.
    """
    found = await _requests(membership)
    out = present | {record.member for record in await membership.ledger()}
    open_ = [e for e in found if present.intersection(e.members) or not out.issuperset(e.joiners)]
    if not open_:
        return len(found), None
    members = present & {member for each in open_ for member in each.members}
    joiners = {member for each in open_ for member in each.joiners} - out
    request = LeaveRequest(
        tuple(sorted(members)),
        "; ".join(dict.fromkeys(each.reason for each in open_)),
        all(each.succeeded for each in open_),
        any(each.saves for each in open_),
        tuple(sorted(joiners)),
    )
    return len(found), request


async def asked(membership: MembershipProtocol, member: int) -> str:
    """Why this member, which takes no part in the agreement on a step, is to leave; or nothing."""
    request = (await requests(membership, frozenset({member})))[1]
    return request.reason if request is not None and request.members else ""


def leave_key(iteration: int, number: int) -> str:
    """The key that is set once the log has more than so many requests."""
    return f"leave/{iteration}/{number}"


async def _requests(membership: MembershipProtocol) -> list[LeaveRequest]:
    return msgspec.convert(lines(await membership.link.read(_LOG)), list[LeaveRequest])
