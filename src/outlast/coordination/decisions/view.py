"""Views: the members of an iteration. Pure functions, no store.

A *member* is one process in the job, with an id for life. The decision about iteration k+1
contains a `ViewRecord`: the ranks of iteration k, the members lost since, and the joiners. Every
member computes the same slots from it: a replacement takes the slot of a lost member, first the one
that it asks for (a launcher starts the replacement of rank 2 as rank 2), so that survivors keep
their ranks; further joiners are appended. Slots that stay empty are the *terminated ranks*, which
the rank assignment then closes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from outlast.coordination import runs
from outlast.coordination.records import StopRecord


@dataclasses.dataclass(frozen=True)
class Joiner:
    """A process that asks to join."""

    member: int
    preferred: int = -1  # the rank that it was started as
    token: str = dataclasses.field(default="", compare=False)  # in its request only


@dataclasses.dataclass(frozen=True)
class ViewRecord:
    """The agreed facts from which iteration `iteration` starts."""

    iteration: int
    base: tuple[Any, ...]  # the member at each rank of the iteration before; `None`: no member
    lost: frozenset[int] = frozenset()  # members of `base` that are out of the job
    joiners: tuple[Joiner, ...] = ()  # in the order in which they asked
    stop: StopRecord | None = None  # the request to stop, if it was known at the decision
    ends_job: bool = False  # no iteration follows: every member leaves, because of `stop`

    @functools.cached_property
    def expected(self) -> frozenset[int]:
        """The members for which a barrier of this iteration waits."""
        present = {m for m in self.base if m is not None and m not in self.lost}
        return frozenset(present | {j.member for j in self.joiners})

    def slots(self) -> tuple[int | None, ...]:
        """The member in each slot, including joiners; `None` for an empty slot."""
        slots = [None if m in self.lost else m for m in self.base]
        waiting = list(self.joiners)
        for joiner in self.joiners:
            if 0 <= joiner.preferred < len(slots) and slots[joiner.preferred] is None:
                slots[joiner.preferred] = joiner.member
                waiting.remove(joiner)
        empty = [place for place, member in enumerate(slots) if member is None]
        for place, joiner in zip(empty, waiting, strict=False):
            slots[place] = joiner.member
        slots.extend(joiner.member for joiner in waiting[len(empty) :])
        return tuple(slots)

    def packed(self) -> ViewRecord:
        """With `base` as runs: what all members read must not grow with their number."""
        return dataclasses.replace(self, base=tuple(runs.pack(self.base)))

    def unpacked(self) -> ViewRecord:
        """The inverse of `packed`."""
        return dataclasses.replace(self, base=tuple(runs.unpack(self.base)))

    def with_stop(self, stop: StopRecord, before: ViewRecord | None) -> ViewRecord:
        """This view under a request to stop.

        One iteration may follow the request. In it, the members restore the newest state, save it
        if it is only in memory, and leave. None follows if that has been done; if `before`, the
        view of the iteration that has just ended, was that iteration; or if a rank was lost and not
        replaced: its part of a state in memory is lost too, so nothing is left to save.
        """
        tried = before is not None and before.stop is not None
        ends = bool(stop.done) or tried or None in self.slots()
        return dataclasses.replace(self, stop=stop, ends_job=ends)


def decide(
    iteration: int,
    roster: dict[int, int],
    world_size: int,
    lost: frozenset[int],
    joiners: list[Joiner],
) -> ViewRecord:
    """The view of iteration `iteration`, from what is known when the one before has ended.

    Args:
        iteration: the new one.
        roster: the member at each rank, of those that entered the iteration before.
        world_size: of the iteration before; ranks without a member are empty slots.
        lost: every member in the ledger.
        joiners: all processes that ever asked to join; members, and lost ones, are left out.
    """
    base = tuple(roster.get(rank) for rank in range(world_size))
    inside = set(base)
    return ViewRecord(
        iteration=iteration,
        base=base,
        lost=frozenset(m for m in base if m is not None and m in lost),
        joiners=tuple(j for j in joiners if j.member not in inside and j.member not in lost),
    )
