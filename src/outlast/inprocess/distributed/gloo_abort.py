"""Ends the gloo collectives of this process that are in flight: `GlooAbort`."""

from __future__ import annotations

from collections.abc import Collection

from outlast.inprocess.distributed import gloo_sockets
from outlast.inprocess.distributed.gloo_blocked_waits import BlockedWaits
from outlast.system.sockets import shut_down

__all__ = ["GlooAbort"]


class GlooAbort:
    """Shuts down gloo's connections, and wakes threads that gloo leaves waiting without any.

    Args:
        keep: inodes of sockets that are left alone.
    """

    def __init__(self, keep: Collection[int] = ()) -> None:
        self._keep = keep
        self._blocked = BlockedWaits()

    def shut_down(self) -> bool:
        """Shuts down all connections between gloo's pairs; returns whether there were any."""
        pairs = [pair for pair in gloo_sockets.pair_sockets().items() if pair[1] not in self._keep]
        for descriptor, inode in pairs:
            shut_down(descriptor, inode)
        return bool(pairs)

    def wake_blocked(self, *, settled: bool) -> int:
        """Wakes the threads that no connection will wake; to be called repeatedly.

        Args:
            settled: whether `shut_down()` has just found no connection.

        Returns:
            How many threads were woken.
        """
        return self._blocked.wake(settled)

    def any_blocked(self) -> bool:
        """Whether any thread waits in gloo."""
        return self._blocked.waiting()
