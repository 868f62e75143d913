"""The only place of this room that reads `os.environ`."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Environment"]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the environment says of the job and of the plan.

    Attributes:
        plan: path of the plan (`OUTLAST_CHAOS`).
        state: directory of the faults that have fired (`OUTLAST_CHAOS_STATE`).
        rank: the rank that the process was started as.
        job: what tells this job from others on the same machine.
    """

    plan: str | None
    state: str | None
    rank: int | None
    job: tuple[str, ...]

    @classmethod
    def read(cls) -> Environment:
        """The environment as it is now."""
        rank = os.environ.get("RANK", "")
        names = ("OUTLAST_JOB", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
        return cls(
            plan=os.environ.get("OUTLAST_CHAOS") or None,
            state=os.environ.get("OUTLAST_CHAOS_STATE") or None,
            rank=int(rank) if rank.isdecimal() else None,
            job=tuple(os.environ.get(name, "") for name in names),
        )
