"""The faults that ended an iteration: the same list, and the same first cause, on every member."""

from __future__ import annotations

from outlast.coordination import barrier
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.records import FaultRecord, ends, first_cause
from outlast.errors import RankFault, RestartAbort, RestartError
from outlast.inprocess.recovery.faults.repeated_faults import (
    FaultHistory,
    RepeatedFaults,
    add_fault,
)


async def agreed_faults(membership: MembershipProtocol, iteration: int) -> list[FaultRecord]:
    """The faults that the iteration ended with, the same on every member.

    The end of a member may be reported after some members have read the faults. Therefore only the
    first such report about each member counts, and none about a member that arrived at the barrier
    `term/k`, or that took no part in iteration k.
    """
    faults = await membership.faults(iteration)
    if any(ends(fault) for fault in faults):
        came = await barrier.arrivals(membership.link, f"term/{iteration}")
        view = await membership.view(iteration)
        missing = set() if view is None else set(view.expected - came.keys())
        kept = []
        for fault in faults:
            if not ends(fault) or fault.member in missing:
                kept.append(fault)
                missing -= {fault.member} if ends(fault) else set()
        faults = kept
    return faults


async def agreed_history(
    membership: MembershipProtocol,
    iteration: int,
    faults: list[FaultRecord],
    policy: RepeatedFaults | None,
) -> FaultHistory:
    """The history of faults after the iteration, the same on every member: the first claim wins.

    Members may know different faults, because the end of a member can be reported late. One that
    was not a member before the iteration reads its history from the store.
    """
    link = membership.link
    before = FaultHistory.decode(await link.read(f"history/{iteration}"))
    said = (await barrier.arrivals(link, f"term/{iteration}")).values()
    step = max((each.get("step", 0) for each in said), default=0)
    step = max(step, *(fault.step for fault in faults), 0)
    # The first ping often stands at the top of the loop, before the code that has never run.
    pings = [each.get("pings", 0) for each in said] + [fault.pings for fault in faults]
    pinged = max(pings, default=0) > 1
    cause = first_cause(faults)
    if cause is not None and cause.may_be_harmless and await _is_joined(membership, iteration):
        cause = None  # no rank failed: connections broke because the job was made to grow
    mine = add_fault(before, cause, step, pinged, policy)
    if await membership.stop_request() is not None:
        mine = mine.without_end()  # at most one iteration follows anyway
    claimed = await link.claim(f"history/{iteration + 1}", mine.encode())
    return FaultHistory.decode(claimed)


async def _is_joined(membership: MembershipProtocol, iteration: int) -> bool:
    """Whether a process that is not in the view of the iteration has asked to join."""
    view = await membership.view(iteration)
    lost = await barrier.lost_members(membership.link)
    members = frozenset[int]() if view is None else view.expected
    return any(j.member not in members | lost for j in await membership.joiners())


async def reporter_of(membership: MembershipProtocol, cause: FaultRecord) -> int:
    """The member that reports the cause to the user: the one that failed, or if that has ended, the
    first that is left.
    """
    arrived = await barrier.arrivals(membership.link, f"term/{cause.iteration}")
    return cause.member if cause.member in arrived else min(arrived, default=-1)


async def cause_of_abort(
    membership: MembershipProtocol, faults: list[FaultRecord], earlier: FaultRecord | None
) -> FaultRecord | None:
    """The cause with which a `RestartAbort` is raised. A member's giving up is the cause only if no
    other fault, in this iteration or (`earlier`) in those before, made it give up. What the end of
    the job overtook did not, nor the connections that broke because it left.
    """
    enders = {record.member for record in await membership.ledger() if record.ends_job}
    others = [f for f in faults if f.member not in enders and not (f.overtaken or f.consequence)]
    return first_cause(others) or earlier or first_cause(faults)


def add_cause(error: BaseException, cause: FaultRecord | None) -> None:
    """Makes `cause` the `__cause__` of an error that ends the restarts, unless it has one."""
    if cause is None or error.__cause__ is not None:
        return
    if isinstance(error, RestartError | RestartAbort):
        error.__cause__ = RankFault(
            cause.cause, rank=cause.rank, host=cause.host, remote_traceback=cause.traceback
        )
