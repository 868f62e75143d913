"""Values that the members of a view publish before the rank assignment, the same on all members.

A barrier collects them, so that no member waits for one whose loss is known. The first member that
has passed it claims what was collected: a member that arrives late, because it was taken for lost,
cannot make the others differ.
"""

from __future__ import annotations

import json

from outlast.coordination import barrier
from outlast.coordination.ops import Link
from outlast.coordination.stores.store import KeyTimeout
from outlast.coordination.view import ViewRecord
from outlast.errors import RankTimeout
from outlast.inprocess.recovery.host_protocol import Host

_KEPT = 8  # iterations, as in `MembershipProtocol.forget`


async def exchange_values(
    link: Link, host: Host, record: ViewRecord, member: int, values: list[str | None]
) -> dict[int, list[str | None]]:
    """Publishes this member's values; returns those of all members, by slot.

    Raises:
        RankTimeout: naming the slots whose members did not publish within the barrier timeout.
    """
    name, slots = f"values/{record.iteration}", record.slots()
    await _forget(link, record.iteration - _KEPT)
    await barrier.arrive(link, name, member, record.expected, values=values)
    await _pass(link, host, name, record)
    arrived = await barrier.arrivals(link, name)
    mine = {slots.index(m): said["values"] for m, said in arrived.items() if m in slots}
    agreed = await link.claim(f"{name}/agreed", json.dumps(mine, separators=(",", ":")).encode())
    return {int(slot): found for slot, found in json.loads(agreed).items()}


async def _pass(link: Link, host: Host, name: str, record: ViewRecord) -> None:
    """Waits for the barrier; checks it by itself where a member dies and nobody notices at once."""
    now, pause = host.clock.now, host.limits.backstop
    deadline = now() + host.limits.barrier
    while True:
        try:
            await link.wait_for(barrier.done_key(name), max(0.0, min(pause, deadline - now())))
            return
        except KeyTimeout:
            missing = await barrier.check(link, name, record.expected)
            if missing and now() >= deadline:
                slots = record.slots()
                ranks = sorted(slots.index(m) for m in missing if m in slots)
                raise RankTimeout(
                    f"ranks {ranks} did not publish what the rank assignment of iteration "
                    f"{record.iteration} needs within barrier_timeout={host.limits.barrier} s"
                ) from None
            pause *= 2


async def _forget(link: Link, iteration: int) -> None:
    if iteration >= 0:
        for part in ("arrived", "count", "done", "agreed"):
            await link.delete(f"values/{iteration}/{part}")
