"""A sample of the function's thread at the end of the iteration: its position and progress.

If a soft timeout ended the iteration, the samples of all ranks distinguish the rank that hangs from
the ranks that wait for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist

from outlast.inprocess.interruption.interrupter import Interrupter
from outlast.inprocess.progress.shared_page import Activity, SharedPage


@dataclasses.dataclass(frozen=True)
class StackSample:
    """The function's thread at one moment.

    `pings` and `collectives` tell how far the function had come; `collectives` counts those of the
    default group, and is -1 if the backend does not count them.
    """

    where: str  # the innermost frames
    waits_for_others: bool  # it was in torch code where a rank waits for others
    idle: float  # seconds since the last progress,
    unpinged: float  # and since the last ping, step, or entry into the function
    declared: bool  # it was in a declared long phase
    pings: int
    collectives: int


def sample_stack(interrupter: Interrupter, page: SharedPage, now: float) -> StackSample | None:
    """Samples from another thread; `None` while the function's thread runs no user code."""
    if page.activity not in (Activity.USER, Activity.FUNCTION):
        return None
    return StackSample(
        where=interrupter.where(),
        waits_for_others=interrupter.waits_for_others(),
        idle=now - page.progress,
        unpinged=now - page.pinged,
        declared=page.long_limit != 0,
        pings=page.pings,
        collectives=_collectives(),
    )


def _collectives() -> int:
    """The number of collectives that this rank has started in the default group. Every rank takes
    part in all of them, so a rank that has started fewer is behind.
    """
    if not dist.is_available():
        return -1
    group: Any = dist.distributed_c10d._world.default_pg
    if group is None:
        return 0  # the function has not created the group yet
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return -1  # not every backend counts
