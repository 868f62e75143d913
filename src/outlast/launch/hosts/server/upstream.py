"""Where the store server of a host sends operations: the store of all hosts."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from outlast.coordination.replicated.operations import Operation, Result

Done = Callable[[Result], None]


class Upstream(Protocol):
    """The store of all hosts, as seen by one event loop. Operations that are in flight together
    may take effect in any order; each takes effect at most once, and exactly once if its result is
    not `Failed`.
    """

    def submit(self, operation: Operation, done: Done) -> Hashable:
        """Starts `operation`; calls `done` with its result, later, from the event loop. Returns
        a handle for `cancel`.
        """

    def cancel(self, handle: Hashable) -> None:
        """Gives up a wait: `done` is not called any more. No effect if it has been called."""
