"""The ways to restore that are compared, and the steps before and after the checkpoint."""

from __future__ import annotations

import dataclasses

__all__ = ["SAVED", "UNSAVED", "WAYS", "Way"]

SAVED = 2
"""Steps of an iteration that its checkpoint contains."""
UNSAVED = 3
"""Complete steps between the checkpoint and the fault."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to restore: its name in the tables, and whether the job keeps live state; whether the
    checkpoint is on disk only, and not in the page cache either.
    """

    name: str
    sources: tuple[str, ...]
    live: bool = False
    from_disk: bool = False
    cold: bool = False


WAYS = {
    "live": Way("survivors", ("live", "replica"), live=True),
    "memory": Way("checkpoint in memory", ("memory",)),
    "warm": Way("disk, in the page cache", ("storage",), from_disk=True),
    "cold": Way("disk, cold", ("storage",), from_disk=True, cold=True),
}
