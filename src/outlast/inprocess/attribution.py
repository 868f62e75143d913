"""The kinds of interruption, and the record of an iteration's interruption: kind and rank."""

from __future__ import annotations

import dataclasses
import enum

__all__ = ["Interruption", "InterruptionRecord"]


class Interruption(enum.Enum):
    """Kinds of interruption.

    * `EXCEPTION`: an `Exception` in the function or in `initialize`.
    * `BASE_EXCEPTION`: the rank left with a `BaseException`, or with an error in its cleanup.
    * `SOFT_TIMEOUT`, `HARD_TIMEOUT`: no progress; the hard timeout terminated the process.
    * `TERMINATED`: the process ended without a report (killed or crashed).
    * `UNRESPONSIVE`: no heartbeat from the rank.
    """

    EXCEPTION = "EXCEPTION"
    BASE_EXCEPTION = "BASE_EXCEPTION"
    SOFT_TIMEOUT = "SOFT_TIMEOUT"
    HARD_TIMEOUT = "HARD_TIMEOUT"
    TERMINATED = "TERMINATED"
    UNRESPONSIVE = "UNRESPONSIVE"


@dataclasses.dataclass(frozen=True)
class InterruptionRecord:
    """An interruption of `rank`."""

    rank: int
    interruption: Interruption

    def __str__(self) -> str:
        return f"{self.rank}:{self.interruption.value}"
