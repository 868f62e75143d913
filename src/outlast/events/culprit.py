"""Which of several hung ranks the others wait for.

When one rank hangs, the others soon stand still as well, in a collective that waits for it; and as
a soft timeout follows each rank's own pace, a victim's may well be over first. So every rank that
stood still gives a testimony, and the culprit is found among all of them:

* who was met inside of torch, where it waits for other ranks, waits for one of those; so does who
  was woken by the end of a connection;
* of those met in other places, who has begun more collectives than another waits for that one, as
  for a result that its device is to bring;
* who has made the fewest pings is the furthest behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

__all__ = ["HUNG", "HungFault", "hung_ranks"]

HUNG = "SOFT_TIMEOUT"
"""The interruption that a rank without progress is reported with."""


class HungFault(Protocol):
    """What a fault says of a rank that stood still. `collectives` is -1 where it is not known."""

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
    """The ranks among `faults` that stood still, one fault each, the likely culprit first.

    A rank's own testimony stands in the place of what its monitor reported, whichever came first.
    Who waits for another is given as a consequence.
    """
    said: dict[int, T] = {}
    echoed: set[int] = set()
    for fault in faults:
        known = said.get(fault.member)
        if fault.interruption != HUNG:
            echoed |= {fault.member} if fault.consequence else set()
        elif known is None or fault.testimony or not known.testimony:
            said[fault.member] = fault
    waiting = echoed | {member for member, fault in said.items() if fault.consequence}
    counts = {m: f.collectives for m, f in said.items() if m not in waiting and f.collectives >= 0}
    waiting |= {member for member, count in counts.items() if count > min(counts.values())}
    judged = [_waiting(fault) if member in waiting else fault for member, fault in said.items()]
    return sorted(judged, key=lambda fault: (fault.consequence, fault.pings))


def _waiting(fault: Any) -> Any:
    return fault if fault.consequence else dataclasses.replace(fault, consequence=True)
