"""Whether all ranks wait: only then does a rank that waits for others show that one of them hangs.

A rank that has waited for the soft timeout counts itself in the store, and takes itself out again
when it goes on. The one that completes the number, together with the ranks that have returned from
the function, reports the hang.

The rank that completes the number may also be one that returns, and reports nothing. So each rank
that waits reads the number again once in every soft timeout: a wait costs the store two operations
for each soft timeout of its length.

A rank that goes on is known to do so only a little later: by its heartbeat thread, then by its
monitor process. So the number is read a second time before it is believed.
"""

from __future__ import annotations

from outlast.clock import Clock
from outlast.inprocess.monitor.store_access import StoreAccess
from outlast.inprocess.progress.shared_page import SharedPage


class IdleRanks:
    """The part of one rank.

    Args:
        confirm: the time until a number that is complete is read again, in seconds.
        again: the same for a number that is not.
    """

    def __init__(
        self, page: SharedPage, store: StoreAccess, clock: Clock, confirm: float, again: float
    ) -> None:
        self._page, self._store = page, store
        self._clock, self._confirm, self._again = clock, confirm, again
        self._counted_in = -1  # the iteration
        self._complete_at: float | None = None  # when this rank has found the number complete
        self._look_at = 0.0

    def wait(self) -> bool:
        """Counts this rank; returns whether the number is complete, and this rank is to say so.
        Call it regularly.
        """
        iteration, now = self._page.iteration, self._clock.now()
        is_new = self._counted_in != iteration
        if is_new or (self._complete_at is None and now >= self._look_at):
            self._counted_in, self._look_at = iteration, now + self._again
            self._complete_at = now if self._change(iteration, int(is_new)) else None
        if self._complete_at is None or now - self._complete_at < self._confirm:
            return False
        self._complete_at = None
        return self._change(iteration, 0)

    def go_on(self) -> None:
        """Takes this rank out again, if it was counted."""
        iteration, self._counted_in = self._counted_in, -1
        if iteration >= 0 and iteration == self._page.iteration:
            self._change(iteration, -1)

    def _change(self, iteration: int, amount: int) -> bool:
        membership, members = self._store.membership, self._page.world_size
        # Without the store, no other rank can know better.
        return self._store.perform(membership.count_idle(iteration, amount, members)) is not False
