"""A pending call of a queue, and its finalize functions. For the main thread."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from outlast.async_checkpoint.calls.reporter import Reporter
from outlast.async_checkpoint.calls.request import AsyncRequest, name_of
from outlast.errors import AsyncCallError
from outlast.system.error_text import describe

__all__ = ["PendingCall", "abandon"]

log = logging.getLogger("outlast.async_checkpoint")


@dataclasses.dataclass(frozen=True)
class PendingCall:
    """A call that was scheduled, and is neither finalized nor failed.

    Attributes:
        index: in the order of scheduling.
        name: of its function, for messages.
        finalize_fns: at the time of scheduling.
    """

    index: int
    name: str
    finalize_fns: tuple[Callable[[], Any], ...]

    @classmethod
    def of(cls, request: AsyncRequest, index: int) -> PendingCall:
        """The pending call for a request."""
        return cls(index, name_of(request.async_fn), tuple(request.finalize_fns))

    def finalize(self) -> AsyncCallError | None:
        """Calls the finalize functions in order. If one raises, the later ones are not called, and
        the error is returned.
        """
        for fn in self.finalize_fns:
            try:
                fn()
            except Exception as e:  # noqa: BLE001 - raised by the queue, with its cause
                error = AsyncCallError(
                    f"finalize function {name_of(fn)} of background call {self.index} "
                    f"({self.name}) failed on this rank: {describe(e)}"
                )
                error.__cause__ = e
                return error
        return None


def abandon(reporter: Reporter, calls: deque[PendingCall]) -> None:
    """Drops the calls of a queue that was collected, or of a program that ends, without a close."""
    if calls:
        what = ", ".join(f"{call.index} ({call.name})" for call in calls)
        log.warning("background calls dropped because their queue was never closed: %s", what)
    reporter.give_up({call.index: call.name for call in calls}, "its queue was never closed")
