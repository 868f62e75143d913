"""What a queue does about a call that has failed, and a checkpointer about a save."""

from __future__ import annotations

import logging

__all__ = ["FailurePolicy"]

log = logging.getLogger("outlast.async_checkpoint")


class FailurePolicy:
    """Goes on after a failed call, but not for ever: training that saves nothing is lost work.

    A failure is logged as a warning, with its traceback. Every rank counts the same failures, so
    all of them go on, or none.

    Args:
        max_in_a_row: how many failures in a row are let pass; the next one is raised.

    Attributes:
        failures: how many there were.
        in_a_row: how many since the last call that succeeded.
        last: the latest, or `None`.
    """

    def __init__(self, max_in_a_row: int = 3) -> None:
        if max_in_a_row < 0:
            raise ValueError(f"max_in_a_row is {max_in_a_row}, and must not be negative")
        self.max_in_a_row = max_in_a_row
        self.failures = 0
        self.in_a_row = 0
        self.last: Exception | None = None

    def succeeded(self) -> None:
        """A call was finalized, a save committed."""
        self.in_a_row = 0

    def failed(self, error: Exception) -> bool:
        """A call or a save has failed. Returns whether to go on."""
        self.failures += 1
        self.in_a_row += 1
        self.last = error
        if self.in_a_row > self.max_in_a_row:
            return False
        log.warning(
            "%s; training goes on: failure %d of at most %d in a row",
            error,
            self.in_a_row,
            self.max_in_a_row,
        )
        return True
