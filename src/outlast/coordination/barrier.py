"""Barriers that count live members: no member waits for one whose end is known.

A barrier is three keys: `arrived`, a log to which each member appends a line; `count`, a hint of
the length of that log; `done`, which all members wait for. A member of `expected` is accounted for
when it is in the log, or in the ledger of lost members.

A process that finds every member accounted for claims `done`, with a summary of the log. So the
members that pass have all read the same summary, and not the log, whose size grows with their
number: only those that complete the barrier read it. That at least one process does so follows
from the order of two steps on either side:

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
from collections.abc import Mapping
from typing import Any

from outlast.coordination import runs
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
    """The record of each member that has arrived; once the barrier is complete, of each that had
    arrived by then. The values in `most` of `arrive` are the greatest of all members.
    """
    done = await link.read(done_key(name))
    return await _log(link, name) if done is None else summary(done)


def summary(done: bytes) -> dict[int, dict[str, Any]]:
    """The arrivals, from the value of the key `done`."""
    return {record["member"]: record for record in runs.unpack_records(done)}


async def _log(link: Link, name: str) -> dict[int, dict[str, Any]]:
    records = sorted(lines(await link.read(f"{name}/arrived")), key=lambda said: said["member"])
    most: dict[str, int] = {}
    for record in records:
        for key, value in record.pop("most", {}).items():
            most[key] = max(value, most.get(key, value))
    return {record["member"]: record | most for record in records}


async def arrive(
    link: Link,
    name: str,
    member: int,
    expected: frozenset[int],
    most: Mapping[str, int] | None = None,
    **said: Any,
) -> None:
    """Records the arrival of `member`, and completes the barrier if it is the last.

    Args:
        most: numbers of which only the greatest of all members counts.
        said: what the others learn of this member.
    """
    line = {"member": member, **said, **({"most": dict(most)} if most else {})}
    record = json.dumps(line, separators=(",", ":")).encode() + b"\n"
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
    arrived = await _log(link, name)
    missing = expected - gone
    missing -= frozenset(arrived)
    if not missing:
        await link.claim(done_key(name), runs.pack_records(list(arrived.values())))
    return missing
