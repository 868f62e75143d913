"""Admission of new processes: a joiner waits for the next view; a restart waits for joiners.

A replacement asks to join (`MembershipProtocol.ask_to_join`), waits here until the iteration has
ended, and takes part in the decision about the next one, which admits it (`coordination/view.py`).
With `AwaitReplacements`, and by default under `outlast run`, the restarting members wait here until
lost ranks have been replaced.
"""

from __future__ import annotations

import logging

from outlast.coordination import barrier
from outlast.coordination.membership import RESTART, MembershipProtocol, resume_key
from outlast.coordination.records import SizeRecord
from outlast.coordination.stores.store import KeyTimeout
from outlast.coordination.view import ViewRecord
from outlast.inprocess.recovery.host_protocol import GrowPolicy, Host
from outlast.system.notices import notice
from outlast.system.units import duration_text

log = logging.getLogger("outlast.inprocess")

_SPEAK_AFTER_S = 5.0
"""After so long, a held restart says what it waits for."""


async def end_iteration_to_join(
    membership: MembershipProtocol, grow: GrowPolicy, iteration: int, view: ViewRecord | None
) -> None:
    """Ends the iteration to admit a joiner, if the grow policy says so, or if every member of the
    iteration is lost, so that no other process would end it. A job that was told to stop is not
    interrupted: it may be saving, and ends soon.
    """
    left = view is None or await barrier.check(membership.link, f"term/{iteration}", view.expected)
    at_once = grow is GrowPolicy.AT_ONCE and await membership.stop_request() is None
    if at_once or not left:
        await membership.end(iteration, RESTART)
        await membership.link.put(resume_key(iteration), b"1")


async def wait_for_end_of_iteration(
    membership: MembershipProtocol, host: Host, iteration: int
) -> tuple[bytes, int]:
    """Waits, as a joiner, until the iteration has ended and every member has left it.

    Returns:
        How it ended, and its number: of a later one, if that was decided in the meantime.
    """
    pause = host.limits.backstop
    while True:
        try:
            how = await membership.link.wait_for(f"over/{iteration}", pause)
            if how == RESTART:
                await membership.link.wait_for(barrier.done_key(f"term/{iteration}"), pause)
            return how, iteration
        except KeyTimeout:
            pause = min(2 * pause, 60.0)
            newest = await membership.current()
            if newest > iteration:  # ended and decided; its keys may be deleted by now
                return RESTART, newest - 1
            view = await membership.view(iteration)
            if view is not None:
                await barrier.check(membership.link, f"start/{iteration}", view.expected)
                if not await barrier.check(membership.link, f"term/{iteration}", view.expected):
                    await membership.end(iteration, RESTART)  # no member is left that would end it


async def hold_for_replacements(
    membership: MembershipProtocol, host: Host, iteration: int, member: int, in_vain: frozenset[int]
) -> frozenset[int]:
    """Holds the restart until the job is back at full size, no missing rank will be replaced, the
    job was told to stop, or the timeout expires.

    Ranks are compared as the launcher numbers them. A rank that the launcher has given up may still
    count as present here, because its loss is not in the ledger yet; but then it is not missing.

    One member, that with the lowest rank, speaks for all: it tells the launchers how many ranks are
    there and needed, and says after a while what the restart waits for. If it is lost, the others
    wake up, and the next one speaks.

    Args:
        member: this one, whose hold ends at once if the others count it as lost.
        in_vain: the ranks for which an earlier hold waited until its timeout.

    Returns:
        The ranks that are still missing after a hold that has waited until its timeout for them.
    """
    limits, now = host.limits, host.clock.now
    begin = now()
    deadline, speak_at = begin + limits.await_seconds, begin + _SPEAK_AFTER_S
    roster, _ = await membership.roster(iteration)
    everyone = frozenset(range(limits.await_size))
    told: SizeRecord | None = None
    spoke = False
    pause = limits.backstop
    try:
        while True:
            # Read before the check: a joiner that it misses is announced under a later number.
            seen = int(await membership.link.read("joined") or b"0")
            lost = await barrier.lost_members(membership.link)
            joiners = await membership.joiners()
            present = (set(roster.values()) | {j.member for j in joiners}) - lost
            if await membership.view(iteration + 1) is not None:
                return in_vain
            # The first members were started as the ranks of the first view, which are their ids.
            started_as = {j.member: j.preferred for j in joiners}
            missing = everyone - {started_as.get(member, member) for member in present}
            in_vain &= missing  # a rank that has come back is waited for again
            if len(present) >= limits.await_size or member in lost:
                return in_vain
            awaited = missing - in_vain - await membership.given_up()
            if not awaited:
                return in_vain
            if await membership.stop_request() is not None:
                return in_vain
            speaks = member == next((m for _, m in sorted(roster.items()) if m not in lost), -1)
            chosen_s = limits.await_seconds if limits.await_chosen else 0.0
            size = SizeRecord(len(present), host.least_ranks(), chosen_s)
            if speaks and size != told:
                await membership.tell_size(size)
                told = size
            until = deadline if spoke or not speaks else min(deadline, speak_at)
            try:
                # The backstop: in rare cases the key is gone by now, see `wake_holders`.
                wait_s = max(0.0, min(pause, until - now()))
                await membership.link.wait_for(f"joined/{seen + 1}", wait_s)
            except KeyTimeout:
                if now() >= deadline:
                    return in_vain | missing
                pause *= 2
                if now() < until:
                    continue
                notice(
                    log,
                    "the restart waits for replacements of the ranks %s, for another %s at most",
                    ", ".join(map(str, sorted(awaited))),
                    duration_text(deadline - now()),
                )
                spoke = True
    finally:
        if spoke:
            notice(log, "the restart has waited %s for replacements", duration_text(now() - begin))
