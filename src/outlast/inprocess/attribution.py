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
    """An interruption of `rank`. `from_str` parses the text that `str()` returns."""

    rank: int
    interruption: Interruption

    def __str__(self) -> str:
        return f"{self.rank}:{self.interruption.value}"

    @classmethod
    def from_str(cls, text: str) -> InterruptionRecord:
        """Parses the text that `str()` returns.

        Raises:
            ValueError: if `text` does not have that form; quotes it.
        """
        rank, separator, kind = text.partition(":")
        try:
            if not separator:
                raise ValueError("no colon")
            return cls(int(rank), Interruption(kind))
        except ValueError as e:
            known = ", ".join(i.value for i in Interruption)
            raise ValueError(
                f"not an interruption record: {text!r} (RANK:KIND with a kind of {known}): {e}"
            ) from e
