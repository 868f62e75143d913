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
import json

from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link
from outlast.coordination.records import FaultRecord, LostRecord, lines


async def enter_host(link: Link, host: str, token: str) -> None:
    """Records that the process with `token` lives on `host`; before it registers."""
    await link.append(f"hosts/{host}", json.dumps({"token": token}).encode() + b"\n")


async def report_killed(
    membership: MembershipProtocol,
    host: str,
    rank: int,
    token: str,
    member: int,
    fault: FaultRecord,
) -> None:
    """Records that a process ended without leaving the job; called by its monitor.

    `member` is its ID; -1 if it did not know that yet. Then the monitor claims `rank` of the first
    view for it, with its `token`, so that the others do not wait for a process that will never
    arrive. It enters the host first: the loss of the host in the middle of this report would leave
    a claim that belongs to no host. `fault` is what is known of its end, without the member.
    """
    if member < 0:
        if host:
            await enter_host(membership.link, host, token)
        registered = await membership.register(rank, token)
        asked = (j.member for j in await membership.joiners() if j.token == token)
        member = next(asked, -1) if registered is None else registered
    if member < 0:
        return  # a joiner that had not asked yet: no member waits for it
    fault = dataclasses.replace(fault, member=member)
    await membership.report_lost(LostRecord(member, fault.cause), fault.iteration, fault)


async def report_host_lost(
    membership: MembershipProtocol, host: str, ranks: range, fault: FaultRecord
) -> frozenset[int]:
    """Records all members on a lost host as lost; returns those that this call has recorded. It may
    be called again, also by another process: a member that is in the ledger already is left out.
    `ranks` are those that its processes were started as; `fault` is what is known of the loss,
    without iteration, member and rank.
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
