"""The kinds of interruption, and the record of an iteration's interruption: kind and rank."""

from __future__ import annotations

import dataclasses

from outlast.events.restart_causes import Interruption

__all__ = ["Interruption", "InterruptionRecord"]


@dataclasses.dataclass(frozen=True)
class InterruptionRecord:
    """An interruption of `rank`."""

    rank: int
    interruption: Interruption

    def __str__(self) -> str:
        return f"{self.rank}:{self.interruption.value}"
