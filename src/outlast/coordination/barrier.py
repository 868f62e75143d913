"""Barriers that count live members: no member waits for one whose end is known.

A barrier is three keys: `arrived`, a log to which each member appends a line; `count`, a hint of
the length of that log; `done`, which all members wait for. A member of `expected` is accounted for
when it is in the log, or in the ledger of lost members.

A process that finds every member accounted for claims `done`, with a summary of the log. So the
members that pass have all read the same summary, and not the log, whose size grows with their
number: only those that complete the barrier read it. (At the barrier that ends an iteration, what
is claimed instead of `done` is the decision about the next one: `MembershipProtocol.decide`.) That
at least one process does so follows from the order of two steps on either side:

    an arriving member:               append to `arrived`,  then read the ledger
    a process that records a loss:    append to the ledger, then read `arrived`

The store puts all operations into one order. If the arriving member does not see the loss, its
append came first, so the recorder sees the arrival; and vice versa. Of all appends, to either log,
that account for the last missing member, the last one is followed by a check that sees everything.
`count` only saves the checks that cannot succeed: each member adds to it after its append, so the
last one to add gets a number that, plus the number of lost members, is not below the size. A
process that dies between its append and its check is recorded by its monitor, which checks again;
if a recorder dies too, the waiting members check when their backstop expires.

Operations: four for a member that is not the last (append, add, read, wait) and seven for the last
(append, add, read, three reads, claim), whatever the size. The first three are one message of a
host, and so are the three reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outlast.coordination.ops import Link
from outlast.coordination.records import lines, pack_records, unpack_columns, unpack_records

LEDGER = "ledger"


def done_key(name: str) -> str:
    """The key that is set when the barrier is complete."""
    return f"{name}/done"


async def lost_members(link: Link) -> frozenset[int]:
    """Every member in the ledger."""
    return _members(await link.read(LEDGER))


def summary(done: bytes) -> dict[int, dict[str, Any]]:
    """The record of each member that has arrived, from the value of the key `done`."""
    return {record["member"]: record for record in unpack_records(done)}


def columns(done: bytes) -> dict[str, list[Any]]:
    """The values of `summary`, by their names."""
    return unpack_columns(done)


async def log(link: Link, name: str) -> dict[int, dict[str, Any]]:
    """The record of each member that has arrived so far, with the greatest values of `most`."""
    return arrivals(await link.read(f"{name}/arrived"))


def arrivals(data: bytes | None) -> dict[int, dict[str, Any]]:
    """As `log`, from the value of the key `arrived`."""
    records = sorted(lines(data), key=lambda each: each["member"])
    most: dict[str, int] = {}
    for record in records:
        for key, value in record.pop("most", {}).items():
            most[key] = max(value, most.get(key, value))
    return {record["member"]: record | most for record in records}


async def record_arrival(
    link: Link,
    name: str,
    member: int,
    expected: frozenset[int],
    most: Mapping[str, int] | None = None,
    **values: Any,
) -> bool:
    """Records the arrival of `member`; returns whether it may be the last, which then has to check.

    Args:
        most: numbers of which only the greatest of all members counts.
        values: what the others learn of this member; `None` stands for nothing.
    """
    known = {key: value for key, value in values.items() if value is not None}
    line = {"member": member, **known, **({"most": dict(most)} if most else {})}
    record = json.dumps(line, separators=(",", ":")).encode() + b"\n"
    await link.append(f"{name}/arrived", record)
    count, ledger = await link.add_and_read(f"{name}/count", 1, LEDGER)
    return count + len(expected & _members(ledger)) >= len(expected)


async def arrive(
    link: Link, name: str, member: int, expected: frozenset[int], **values: Any
) -> bytes | None:
    """Records the arrival; the last member completes the barrier, and gets the value of `done`."""
    if await record_arrival(link, name, member, expected, **values):
        return await complete(link, name, expected)
    return None


async def complete(link: Link, name: str, expected: frozenset[int]) -> bytes | None:
    """Completes the barrier if all are accounted for: the value of `done`, else `None`."""
    done, data, ledger = await link.read_all(done_key(name), f"{name}/arrived", LEDGER)
    arrived = arrivals(data)
    if done is not None or expected - arrived.keys() - _members(ledger):
        return done
    return await link.claim(done_key(name), pack_records(list(arrived.values())))


async def missing(link: Link, name: str, expected: frozenset[int]) -> frozenset[int]:
    """The members that are not accounted for."""
    data, ledger = await link.read_all(f"{name}/arrived", LEDGER)
    return expected - arrivals(data).keys() - _members(ledger)


def _members(ledger: bytes | None) -> frozenset[int]:
    return frozenset(record["member"] for record in lines(ledger))
