"""The environment variables of fault injection; the only module of it that reads them."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Settings from environment variables."""

    plan: str | None  # the path of the plan (`OUTLAST_CHAOS`)
    state: str | None  # the directory of the records of fired faults (`OUTLAST_CHAOS_STATE`)
    rank: int | None  # the rank that the launcher gave this process
    job: tuple[str, ...]  # values that identify this job among others on the same machine
    store_port: int | None = None  # the port of the job's store (`MASTER_PORT`)

    @classmethod
    def read(cls) -> Environment:
        rank, port = os.environ.get("RANK", ""), os.environ.get("MASTER_PORT", "")
        names = ("OUTLAST_JOB", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
        return cls(
            plan=os.environ.get("OUTLAST_CHAOS") or None,
            state=os.environ.get("OUTLAST_CHAOS_STATE") or None,
            rank=int(rank) if rank.isdecimal() else None,
            store_port=int(port) if port.isdecimal() else None,
            job=tuple(os.environ.get(name, "") for name in names),
        )
