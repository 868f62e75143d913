"""How a queue handles failed calls, and a checkpointer failed saves."""

from __future__ import annotations

import logging

from outlast.errors import OutlastError
from outlast.system.arguments import as_int
from outlast.system.error_text import message

__all__ = ["FailurePolicy"]

log = logging.getLogger("outlast.async_checkpoint")


class FailurePolicy:
    """Tolerates failures, but not forever: training that saves nothing is lost work.

    A failure is logged as a warning, on the rank that failed: what failed and why, that training
    continues, and below that the traceback of a mistake. Every rank counts the same failures, so
    all ranks continue, or none.

    Args:
        max_in_a_row: how many failures in a row are tolerated; the next one is raised.

    Attributes:
        failures: the number of failures.
        in_a_row: the number of failures since the last success.
        last: the latest error, or `None`.
    """

    def __init__(self, max_in_a_row: int = 3) -> None:
        self.max_in_a_row = as_int("max_in_a_row", max_in_a_row, at_least=0)
        self.failures = 0
        self.in_a_row = 0
        self.last: Exception | None = None

    def succeeded(self) -> None:
        self.in_a_row = 0

    def failed(self, error: Exception) -> bool:
        """Counts a failure. Returns whether to tolerate it."""
        self.failures += 1
        self.in_a_row += 1
        self.last = error
        if self.in_a_row > self.max_in_a_row:
            return False
        # The message of an error on another rank ends with that rank's traceback.
        what, _, details = message(error).partition("\n")
        another = isinstance(error, OutlastError) and error.of_another_rank
        log.log(
            logging.INFO if another else logging.WARNING,
            "%s. Training continues: failure %d of at most %d in a row is tolerated%s",
            what.removesuffix("."),
            self.in_a_row,
            self.max_in_a_row,
            f"\n{details}" if details else "",
        )
        return True
