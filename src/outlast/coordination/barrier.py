"""Barriers that count live members: no member waits for one whose end is known.

A barrier is three keys: `arrived`, a log to which each member appends a line; `count`, a hint of
the length of that log; `done`, which all members wait for. A member of `expected` is accounted for
when it is in the log, or in the ledger of lost members.

A process that finds every member accounted for sets `done`. That at least one does so follows from
the order of two steps on either side:

    an arriving member:               append to `arrived`,  then read the ledger
    a process that records a loss:    append to the ledger, then read `arrived`

The store puts all operations into one order. If the arriving member does not see the loss, its
append came first, so the recorder sees the arrival; and vice versa. Of all appends, to either log,
that account for the last missing member, the last one is followed by a check that sees everything.
`count` only saves the checks that cannot succeed: each member adds to it after its append, so the
last one to add gets a number that, plus the number of lost members, is not below the size. A
process that dies between its append and its check is recorded by its monitor, which checks again;
if a recorder dies too, the waiting members check when their backstop expires.

Operations: four for a member that is not the last (append, add, read, wait), so a constant number
per member, whatever the size.
"""

from __future__ import annotations

import json
from typing import Any

from outlast.coordination.ops import Link
from outlast.coordination.records import lines

LEDGER = "ledger"


def done_key(name: str) -> str:
    """The key that is set when the barrier is complete."""
    return f"{name}/done"


async def lost_members(link: Link) -> frozenset[int]:
    """Every member in the ledger."""
    return frozenset(record["member"] for record in lines(await link.read(LEDGER)))


async def arrivals(link: Link, name: str) -> dict[int, dict[str, Any]]:
    """The record of each member that has arrived."""
    return {record["member"]: record for record in lines(await link.read(f"{name}/arrived"))}


async def arrive(link: Link, name: str, member: int, expected: frozenset[int], **said: Any) -> None:
    """Records the arrival of `member`, and completes the barrier if it is the last."""
    record = json.dumps({"member": member, **said}, separators=(",", ":")).encode() + b"\n"
    await link.append(f"{name}/arrived", record)
    count = await link.add(f"{name}/count", 1)
    lost = await lost_members(link)
    if count + len(expected & lost) >= len(expected):
        await check(link, name, expected, lost)


async def check(
    link: Link, name: str, expected: frozenset[int], lost: frozenset[int] | None = None
) -> frozenset[int]:
    """Completes the barrier if every member of `expected` is accounted for; returns the missing
    ones. `lost` is the ledger, if it was read after this process's own last append.
    """
    gone = await lost_members(link) if lost is None else lost
    missing = expected - gone
    if missing:
        missing -= frozenset(await arrivals(link, name))
    if not missing:
        await link.put(done_key(name), b"1")
    return missing
