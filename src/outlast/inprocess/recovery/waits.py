"""The waits between two iterations: of a joiner for the end of the running one, and of all members
for the decision about the next, which a restart without its replacements delays.

A replacement asks to join (`MembershipProtocol.ask_to_join`), waits until the iteration has ended,
and then for the decision, as the members do. With `AwaitReplacements`, and by default under
`outlast run`, that decision waits until lost ranks have been replaced. No member is needed for it:
the last replacement to ask makes it, or the launcher that gives up the last rank.

The checks after each pause of a wait are a backstop in case the process dies that should have made
the decision, or completed the barrier; a healthy recovery never needs them.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from outlast.coordination import barrier
from outlast.coordination.decision import Decision, Held, Reached, ViewRecord, decode_record
from outlast.coordination.membership import RESTART, MembershipProtocol, decision_key, resume_key
from outlast.coordination.moves import join_after_step
from outlast.coordination.ops import Link
from outlast.coordination.stores.store import KeyTimeout
from outlast.errors import RankLostError, RankTimeout
from outlast.inprocess.recovery.host_protocol import GrowPolicy, Host
from outlast.system.notices import notice
from outlast.system.units import duration_text

log = logging.getLogger("outlast.inprocess")

_SPEAK_AFTER_S = 5.0
"""After so long, a held restart says what it waits for."""


async def end_iteration_to_join(
    membership: MembershipProtocol,
    grow: GrowPolicy,
    iteration: int,
    view: ViewRecord | None,
    member: int,
) -> None:
    """Ends the iteration to admit the joiner `member`, if the grow policy says so: after a step
    that the ranks agree on, if they can (`moves.join_after_step`). Or if no member is in it: then
    the joiner also decides what follows, as no other process may do so. A member that is still in
    it will decide later, and find the request to join. A job that was told to stop, or that only
    saves, is not interrupted: it ends soon.
    """
    link, expected = membership.link, frozenset[int]() if view is None else view.expected
    stop, over = await link.read_all("stop", f"over/{iteration}")
    inside = view is None or await barrier.missing(link, f"term/{iteration}", expected)
    at_once = grow is GrowPolicy.AT_ONCE and stop is None
    at_once = at_once and not (view is not None and view.saves)
    if at_once and inside and view is not None:
        at_once = not await join_after_step(membership, iteration, view, member)
    if at_once or not inside:
        if over is None:
            await membership.end(iteration, RESTART)
        await link.put(resume_key(iteration), b"1")
    if not inside:
        await membership.decide(iteration, Reached.ASKED)


async def wait_for_end_of_iteration(
    membership: MembershipProtocol, host: Host, iteration: int
) -> bytes:
    """Waits, as a joiner, until the iteration has ended; returns how."""
    pause = host.durations.backstop
    while True:
        try:
            return await membership.link.wait_for(f"over/{iteration}", pause)
        except KeyTimeout:
            pause = min(2 * pause, 60.0)
            view = await membership.view(iteration)
            if view is not None:
                await barrier.complete(membership.link, f"start/{iteration}", view.expected)
                if not await barrier.missing(membership.link, f"term/{iteration}", view.expected):
                    await membership.end(iteration, RESTART)  # no member is left that would end it


async def leave_iteration(
    membership: MembershipProtocol, host: Host, view: ViewRecord, member: int
) -> Decision:
    """Records that this member has left the iteration of this view, and waits for the decision that
    follows. A joiner is not in the view, and only waits. A `RankTimeout` if a member has not left
    within the barrier timeout; a `RankLostError` if the others count this member as lost.
    """
    durations, now, iteration = host.durations, host.clock.now, view.iteration
    record: Decision | Held | None = None
    with host.timing("term"):
        limit = math.inf
        if member in view.expected:
            left = iteration, member, view.expected, host.progress()
            record = await membership.leave(*left, keeps=host.keeps)
            limit = durations.barrier
        if record is None:
            record = await _next_record(membership, host, iteration, 0, None, now() + limit)
    if record is None:
        name = f"term/{iteration}"
        missing = await barrier.missing(membership.link, name, view.expected)
        raise RankTimeout(_describe(host, name, view, missing, member))
    number, began = 0, dict[bool, float]()
    while isinstance(record, Held):
        if member in record.lost:
            await leave_if_lost(membership, member)
        number += 1
        limit = durations.barrier / 2 if record.links else durations.hold
        deadline = began.setdefault(record.links, now()) + limit
        # One member checks, that with the lowest ID. If it is lost, another note follows.
        checks = member == min(view.expected - record.lost, default=member)
        with host.timing(record.what):
            record = await _next_record(
                membership, host, iteration, number, record, deadline, checks=checks
            )
        assert record is not None, "a wait that is over is followed by a record"
    return record


async def _next_record(
    membership: MembershipProtocol,
    host: Host,
    iteration: int,
    number: int,
    held: Held | None,
    deadline: float,
    *,
    checks: bool = True,
) -> Decision | Held | None:
    """Waits for one record of the decision. Without one at the deadline: what follows without the
    wait `held`, or `None` if a member is still in the iteration. A member that `checks` does so as
    a backstop, and says what a held restart waits for.
    """
    now, key = host.clock.now, decision_key(iteration + 1, number)
    began, spoke = now(), False
    pause = host.durations.backstop if checks else math.inf
    deadline += 0.0 if checks else host.durations.backstop
    speaks_at = began + _SPEAK_AFTER_S if checks and held and not held.links else math.inf
    try:
        while True:
            wait_s = min(pause, deadline - now(), speaks_at - now())
            try:
                return decode_record(await membership.link.wait_for(key, max(0.0, wait_s)))
            except KeyTimeout:
                over, speaks = now() >= deadline, now() >= speaks_at
            expired = held if over else None
            then = await membership.decide(iteration, Reached.TIMEOUT, expired)
            if over and then is None:
                return None
            if speaks and isinstance(then, Held):
                speaks_at, spoke = math.inf, True
                notice(
                    log,
                    "the restart waits for replacements of the ranks %s, for another %s at most",
                    ", ".join(map(str, then.ranks)),
                    duration_text(deadline - now()),
                )
            elif not over:
                pause *= 2
    finally:
        if spoke:
            notice(log, "the restart has waited %s for replacements", duration_text(now() - began))


async def pass_barrier(
    link: Link, host: Host, name: str, view: ViewRecord, member: int, **record: Any
) -> bytes:
    """Waits at a barrier of the view; returns its `barrier.summary`, which only those unpack that
    need each record, or raises `RankTimeout`.
    """
    done = await barrier.arrive(link, name, member, view.expected, **record)
    durations, now = host.durations, host.clock.now
    deadline, pause = now() + durations.barrier, durations.backstop
    while done is None:
        try:
            wait_s = max(0.0, min(pause, deadline - now()))
            done = await link.wait_for(barrier.done_key(name), wait_s)
        except KeyTimeout:
            done = await barrier.complete(link, name, view.expected)
            if done is None and now() >= deadline:
                missing = await barrier.missing(link, name, view.expected)
                raise RankTimeout(_describe(host, name, view, missing, member)) from None
            pause *= 2
    return done


async def leave_if_lost(membership: MembershipProtocol, member: int) -> None:
    """Raises a `RankLostError` if the others count this member as lost."""
    for record in await membership.ledger():
        if record.member == member:
            raise RankLostError(f"the other ranks count this one as lost: {record.reason}")


def _describe(host: Host, name: str, view: ViewRecord, missing: frozenset[int], member: int) -> str:
    slots = view.slots()
    ranks = sorted(slots.index(m) for m in missing if m in slots)
    own = slots.index(member) if member in slots else host.preferred_rank
    return (
        f"rank {own}: barrier {name} was not passed within barrier_timeout="
        f"{host.durations.barrier} s: ranks {ranks} did not arrive"
    )
