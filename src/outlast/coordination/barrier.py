"""Barriers that count the living: nobody waits for a member whose end is known.

A barrier is three keys: `arrived`, a log that each member appends its line to; `count`, a hint of
how long that log is; `done`, which everyone waits for. A member of `expected` is accounted for
when it stands in the log, or in the ledger of lost members.

Who sets `done`? Whoever finds everyone accounted for. That somebody does follows from the order
of two steps on either side:

    an arriving member:      append to `arrived`,  then read the ledger
    who records a loss:      append to the ledger, then read `arrived`

All operations have one order at the store. If the arriving member does not see the loss, its
append came first, so the recorder sees the arrival; and the other way round. Of all appends, to
either log, that account for the last missing member, the last one is followed by a check that
sees everything. `count` only spares the check where it cannot succeed: each member adds to it
after its append, so the last to add gets a number that, with the lost, is not below the size.
A process that dies between its append and its check is itself recorded by its monitor, which
checks again; should a recorder die as well, the waiting members check when their backstop is over.

Operations: four for a member that is not the last (append, add, read, wait), so a constant number
a member, whatever the size.
"""

from __future__ import annotations

import json
from typing import Any

from outlast.coordination.ops import Link
from outlast.coordination.records import lines

__all__ = ["LEDGER", "arrivals", "arrive", "check", "done_key", "lost_members"]

LEDGER = "ledger"


def done_key(name: str) -> str:
    """The key that is set when the barrier is passed."""
    return f"{name}/done"


async def lost_members(link: Link) -> frozenset[int]:
    """Every member in the ledger."""
    return frozenset(record["member"] for record in lines(await link.read(LEDGER)))


async def arrivals(link: Link, name: str) -> dict[int, dict[str, Any]]:
    """What each member said when it arrived."""
    return {record["member"]: record for record in lines(await link.read(f"{name}/arrived"))}


async def arrive(link: Link, name: str, member: int, expected: frozenset[int], **said: Any) -> None:
    """Says that `member` is at the barrier, and completes the barrier if it was the last."""
    record = json.dumps({"member": member, **said}, separators=(",", ":")).encode() + b"\n"
    await link.append(f"{name}/arrived", record)
    count = await link.add(f"{name}/count", 1)
    lost = await lost_members(link)
    if count + len(expected & lost) >= len(expected):
        await check(link, name, expected, lost)


async def check(
    link: Link, name: str, expected: frozenset[int], lost: frozenset[int] | None = None
) -> frozenset[int]:
    """Completes the barrier if every member is accounted for; returns those that are not.

    Args:
        link: the store.
        name: of the barrier.
        expected: the members that it waits for.
        lost: the ledger, if it was read after this process's own last append.
    """
    gone = await lost_members(link) if lost is None else lost
    missing = expected - gone
    if missing:
        missing -= frozenset(await arrivals(link, name))
    if not missing:
        await link.put(done_key(name), b"1")
    return missing
