"""Values that the members of a view publish before the rank assignment, the same on all members: a
barrier collects them, so that no member waits for one whose loss is known.
"""

from __future__ import annotations

from outlast.coordination.decisions.view import ViewRecord
from outlast.coordination.ops import Link
from outlast.inprocess.recovery.host_protocol import Host
from outlast.inprocess.recovery.waits import pass_barrier


async def exchange_values(
    link: Link, host: Host, record: ViewRecord, member: int, values: list[str | None]
) -> dict[int, list[str | None]]:
    """Publishes this member's values; returns those of all members, by slot.

    Raises:
        RankTimeout: naming the ranks whose members did not publish within the barrier timeout.
    """
    slots = record.slots()
    name = f"values/{record.iteration}"
    arrived = await pass_barrier(link, host, name, record, member, values=values)
    return {slots.index(m): said["values"] for m, said in arrived.items() if m in slots}
