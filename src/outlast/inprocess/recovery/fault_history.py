"""The faults that ended an iteration: the same list, and the same first cause, on every member."""

from __future__ import annotations

from outlast.coordination import barrier
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.records import FaultRecord, ends, first_cause
from outlast.errors import RankFault, RestartAbort, RestartError


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


async def cause_of_abort(
    membership: MembershipProtocol, faults: list[FaultRecord], earlier: FaultRecord | None
) -> FaultRecord | None:
    """The cause with which a `RestartAbort` is raised. A member's giving up is the cause only if no
    other fault, in this iteration or (`earlier`) in those before, made it give up.
    """
    enders = {record.member for record in await membership.ledger() if record.ends_job}
    others = [fault for fault in faults if fault.member not in enders]
    return first_cause(others) or earlier or first_cause(faults)


def add_cause(error: BaseException, cause: FaultRecord | None) -> None:
    """Makes `cause` the `__cause__` of an error that ends the restarts, unless it has one."""
    if cause is None or error.__cause__ is not None:
        return
    if isinstance(error, RestartError | RestartAbort):
        error.__cause__ = RankFault(
            cause.cause, rank=cause.rank, host=cause.host, remote_traceback=cause.traceback
        )
