"""Gets a thread out of a collective that others will never come to.

A `sync` that raises on one replica leaves the others in the collective that it did not get to, for
the timeout of the group: 30 minutes by default. Once it is known that the call has failed, and a
thread does not come out of it by itself, gloo's connections are shut down; so every collective in
flight raises. That costs nothing that was not lost: after a collective that not all ranks have
entered, their groups are out of step. NCCL's collectives do not hold up the thread that calls them.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from outlast.inprocess.distributed import gloo_sockets
from outlast.inprocess.distributed.gloo_blocked_waits import ForgottenWaits
from outlast.system.sockets import shut_down

__all__ = ["Rescue"]

log = logging.getLogger("outlast.elastic")

GRACE_S = 3.0
"""How long a thread may take to come out by itself, once the call has failed."""
_AGAIN_S = 0.02


class Rescue:
    """A block in which a thread may be in a collective.

    Args:
        over: set when the call has ended for all replicas. While a thread is within the block, that
            can only be because one has failed: this one has not finished.
        grace_s: how long a thread may take to come out by itself then, in seconds.
    """

    def __init__(self, over: threading.Event, grace_s: float = GRACE_S) -> None:
        self._over = over
        self._grace = grace_s
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="outlast-rescue", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.set()

    def _watch(self) -> None:
        self._over.wait()
        if self._left.wait(self._grace):
            return
        log.warning("a replica has failed: the collectives that wait for it are ended")
        forgotten = ForgottenWaits()
        while True:
            pairs = gloo_sockets.pair_sockets()
            for descriptor, inode in pairs.items():
                shut_down(descriptor, inode)
            if self._left.wait(_AGAIN_S):
                return
            forgotten.wake(settled=not pairs)
