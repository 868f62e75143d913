"""Admission of new processes: a joiner waits for the next view; a restart waits for joiners.

A replacement asks to join (`MembershipProtocol.ask_to_join`), waits here until the iteration has
ended, and takes part in the decision about the next one, which admits it (`coordination/view.py`).
With `AwaitReplacements`, the restarting members wait here until lost ranks have been replaced.
"""

from __future__ import annotations

from outlast.coordination import barrier
from outlast.coordination.membership import RESTART, MembershipProtocol
from outlast.coordination.stores.store import KeyTimeout
from outlast.coordination.view import ViewRecord
from outlast.inprocess.recovery.host_protocol import GrowPolicy, Host


async def end_iteration_to_join(
    membership: MembershipProtocol, grow: GrowPolicy, iteration: int, view: ViewRecord | None
) -> None:
    """Ends the iteration to admit a joiner, if the grow policy says so, or if every member of the
    iteration is lost, so that no other process would end it.
    """
    left = view is None or await barrier.check(membership.link, f"term/{iteration}", view.expected)
    if grow is GrowPolicy.AT_ONCE or not left:
        await membership.end(iteration, RESTART)


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


async def hold_for_replacements(membership: MembershipProtocol, host: Host, iteration: int) -> None:
    """Holds the restart until the job is back at full size, or the timeout expires."""
    limits, now = host.limits, host.clock.now
    deadline = now() + limits.await_seconds
    roster, _ = await membership.roster(iteration)
    while True:
        # Read before the check: a joiner that the check misses is announced under a later number.
        seen = int(await membership.link.read("joined") or b"0")
        lost = await barrier.lost_members(membership.link)
        joiners = await membership.joiners()
        present = (set(roster.values()) | {j.member for j in joiners}) - lost
        decided = await membership.view(iteration + 1) is not None
        if decided or len(present) >= limits.await_size or now() >= deadline:
            return
        try:
            await membership.link.wait_for(f"joined/{seen + 1}", deadline - now())
        except KeyTimeout:
            return
