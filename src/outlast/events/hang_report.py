"""The hang report: identifies which of several hung ranks the others were waiting for.

When one rank hangs, the others soon stop as well, in a collective that waits for that rank. Since a
soft timeout adapts to each rank's pace, the timeout of a waiting rank may well expire first.
Therefore every rank that stopped reports its own state (its testimony), and the reports together
show the cause:

* a rank found inside torch, where it waits for other ranks, waits for one of the rest; so does a
  rank woken up by the end of a connection;
* among the rest, a rank that has started more collectives than another waits for that other rank
  (for a result that its device is to produce, for example);
* among those left, the rank with the fewest pings is the furthest behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

HUNG = "SOFT_TIMEOUT"
"""The interruption that reports a rank without progress."""


class HungFault(Protocol):
    """The fields of a fault that describe a hung rank. `collectives` is -1 if unknown."""

    @property
    def member(self) -> int: ...
    @property
    def interruption(self) -> str: ...
    @property
    def consequence(self) -> bool: ...
    @property
    def testimony(self) -> bool: ...
    @property
    def pings(self) -> int: ...
    @property
    def collectives(self) -> int: ...


T = TypeVar("T", bound=HungFault)


def hung_ranks(faults: Sequence[T]) -> list[T]:
    """The hung ranks among `faults`, one fault each, the likely cause first.

    A rank's own testimony replaces its monitor's report, in whichever order they arrived. A rank
    that waits for another is marked as a consequence.
    """
    reported: dict[int, T] = {}
    echoed: set[int] = set()
    for fault in faults:
        known = reported.get(fault.member)
        if fault.interruption != HUNG:
            echoed |= {fault.member} if fault.consequence else set()
        elif known is None or fault.testimony or not known.testimony:
            reported[fault.member] = fault
    waiting = echoed | {member for member, fault in reported.items() if fault.consequence}
    counts = {
        member: fault.collectives
        for member, fault in reported.items()
        if member not in waiting and fault.collectives >= 0
    }
    waiting |= {member for member, count in counts.items() if count > min(counts.values())}
    for member in waiting & reported.keys():
        waiter: Any = reported[member]
        reported[member] = dataclasses.replace(waiter, consequence=True)
    return sorted(reported.values(), key=lambda fault: (fault.consequence, fault.pings))
