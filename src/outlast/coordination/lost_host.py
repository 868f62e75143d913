"""The loss of a whole host: all of its members at once, reported by another host's launcher.

A process that dies is reported by its monitor process. A host that dies takes the monitors with it,
so each process records before it registers that it lives on this host, under `hosts/ID`. The order
of the steps leaves no gap:

    a process:      append its token to `hosts/ID`,  then claim its rank, or ask to join
    its monitor:    if the process has died before it knew its member ID: the same
    the reporter:   claim the ranks of the host,     then read `hosts/ID` and the requests to join

If the process has claimed its rank before the reporter tries, its token was appended before that,
so the reporter finds it; otherwise the rank's claim is the reporter's, and counts as that of a lost
member. A request to join that comes after the reporter has read the requests is one that the store
refuses, because the reporter acts only once the store has closed itself to the host.
"""

from __future__ import annotations

import dataclasses

from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link
from outlast.coordination.records import FaultRecord, LostRecord, lines, to_line


@dataclasses.dataclass(frozen=True)
class Resident:
    """A process that runs on a host: the token with which it registers."""

    token: str


async def enter_host(link: Link, host: str, token: str) -> None:
    """Records that the process with `token` lives on `host`; before it registers."""
    await link.append(f"hosts/{host}", to_line(Resident(token)))


async def report_killed(
    membership: MembershipProtocol,
    host: str,
    rank: int,
    token: str,
    member: int,
    fault: FaultRecord,
) -> None:
    """`MembershipProtocol.report_killed` on a job with many hosts. The process may have died before
    it entered its host; the claim of its rank that its monitor makes for it must not come first, or
    the loss of the host in the middle of this report would leave a claim that belongs to no host.

    Args:
        host: of the process and its monitor; empty on a job with one host.
    """
    if host and member < 0:
        await enter_host(membership.link, host, token)
    await membership.report_killed(rank, token, member, fault)


async def report_host_lost(
    membership: MembershipProtocol, host: str, ranks: range, fault: FaultRecord
) -> frozenset[int]:
    """Records all members on a lost host as lost. It may be called again, also by another process:
    a member that is in the ledger already is left out.

    Args:
        host: the ID under which its processes have entered.
        ranks: the ranks that its processes were started as.
        fault: what is known of the loss; iteration, member and rank are filled in.

    Returns:
        The members that this call has recorded.
    """
    link = membership.link
    claimed = {rank: await membership.register(rank, f"lost with {host}") for rank in ranks}
    tokens = {line["token"] for line in lines(await link.read(f"hosts/{host}"))}
    members = {member: rank for rank, member in claimed.items() if member is not None}
    for rank in ranks:
        if claimed[rank] is None and (await link.read(f"claim/{rank}") or b"").decode() in tokens:
            members[rank] = rank  # the first members were started as the ranks that are their IDs
    for joiner in await membership.joiners():
        if joiner.token in tokens:
            members[joiner.member] = joiner.preferred
    known = {record.member: record.discarded for record in await membership.ledger()}
    lost = {member: rank for member, rank in sorted(members.items()) if member not in known}
    iteration = await membership.current()
    faults = [
        dataclasses.replace(fault, iteration=iteration, member=member, rank=rank)
        for member, rank in lost.items()
    ]
    losses = [LostRecord(member, fault.cause) for member in lost]
    if losses:
        await membership.report_all_lost(losses, iteration, faults)
    # Another reporter may have died between its entries in the ledger and this.
    before = frozenset(members.keys() & known.keys())
    if before:
        discarded = frozenset(member for member in before if known[member])
        await membership.wake_for_lost(iteration, before - discarded, discarded)
    return frozenset(lost)
