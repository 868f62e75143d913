"""Where the function's thread was, and how far it had come, when the end of the iteration came.

If a soft timeout ended it, that tells the rank that hangs from those that wait for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist

from outlast.inprocess.interruption.interrupter import Interrupter
from outlast.inprocess.progress.shared_page import Activity, SharedPage

__all__ = ["Standstill", "look"]


@dataclasses.dataclass(frozen=True)
class Standstill:
    """What is known of the function's thread at one moment.

    Attributes:
        where: the place that it was in.
        waits: it was in a place of torch's where a rank waits for others, as in a collective.
        idle: seconds since its last progress.
        declared: it was in a long phase that it had declared.
        pings, collectives: how far it had come; the collectives are those of the default group,
            -1 where the group does not tell.
    """

    where: str
    waits: bool
    idle: float
    declared: bool
    pings: int
    collectives: int


def look(interrupter: Interrupter, page: SharedPage, now: float) -> Standstill | None:
    """Looks from another thread; `None` while the thread runs no code of the user's."""
    if page.activity not in (Activity.USER, Activity.FUNCTION):
        return None
    return Standstill(
        where=interrupter.where(),
        waits=interrupter.waits_for_others(),
        idle=now - page.progress,
        declared=page.long_limit != 0,
        pings=page.pings,
        collectives=_collectives(),
    )


def _collectives() -> int:
    """How many collectives of the default group this rank has begun. Every rank takes part in all
    of them, so whoever has begun fewer is behind.
    """
    if not dist.is_available():
        return -1
    group: Any = dist.distributed_c10d._world.default_pg
    if group is None:
        return 0  # it has not come that far
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return -1  # not every backend counts
