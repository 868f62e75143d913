"""One call of a queue, as its main thread knows it, and its finalize functions."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from outlast.async_checkpoint.calls.reporter import Watcher
from outlast.async_checkpoint.calls.request import AsyncRequest, name_of
from outlast.errors import AsyncCallError
from outlast.system.error_text import describe

__all__ = ["Call", "abandon"]

log = logging.getLogger("outlast.async_checkpoint")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that was scheduled, and neither finalized nor given up.

    Attributes:
        index: in the order of scheduling.
        name: of its function, for messages.
        finalize_fns: as they were when it was scheduled.
    """

    index: int
    name: str
    finalize_fns: tuple[Callable[[], Any], ...]

    @classmethod
    def of(cls, request: AsyncRequest, index: int) -> Call:
        """The call that a request is scheduled as."""
        return cls(index, name_of(request.async_fn), tuple(request.finalize_fns))

    def finalize(self) -> AsyncCallError | None:
        """Calls the finalize functions in order. Returns the error if one raises; those behind it
        are not called then.
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


def abandon(watcher: Watcher, calls: deque[Call]) -> None:
    """For a queue that is gone, or a program that ends, with nobody having closed the queue."""
    if calls:
        what = ", ".join(f"{call.index} ({call.name})" for call in calls)
        log.warning("background calls dropped, as their queue was never closed: %s", what)
    watcher.give_up({call.index: call.name for call in calls}, "its queue was never closed")
