"""What interrupted an iteration, and on which rank."""

from __future__ import annotations

import dataclasses
import enum

__all__ = ["Interruption", "InterruptionRecord"]


class Interruption(enum.Enum):
    """Kinds of interruption.

    * `EXCEPTION`: an `Exception` in the function or in `initialize`.
    * `BASE_EXCEPTION`: the rank left with a `BaseException` or with an error of its own clean-up.
    * `SOFT_TIMEOUT`, `HARD_TIMEOUT`: no progress; the second ended the process.
    * `TERMINATED`: the process ended without a word.
    * `UNRESPONSIVE`: the rank was not heard of.
    """

    EXCEPTION = "EXCEPTION"
    BASE_EXCEPTION = "BASE_EXCEPTION"
    SOFT_TIMEOUT = "SOFT_TIMEOUT"
    HARD_TIMEOUT = "HARD_TIMEOUT"
    TERMINATED = "TERMINATED"
    UNRESPONSIVE = "UNRESPONSIVE"


@dataclasses.dataclass(frozen=True)
class InterruptionRecord:
    """An interruption of `rank`. `str()` gives text, `from_str` reads it back."""

    rank: int
    interruption: Interruption

    def __str__(self) -> str:
        return f"{self.rank}:{self.interruption.value}"

    @classmethod
    def from_str(cls, text: str) -> InterruptionRecord:
        """Reads what `str()` gave.

        Raises:
            ValueError: if `text` is not of that form; says what it was.
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
