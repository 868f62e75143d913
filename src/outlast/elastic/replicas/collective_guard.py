"""Interrupts a collective that other replicas will never enter.

A `sync` that raises on one replica leaves the others in the collective that it did not enter, for
the timeout of the group: 30 minutes by default. Once the call is known to have failed, and a thread
does not leave it by itself, gloo's connections are shut down; so every collective in flight raises.
Nothing more is lost by that: after a collective that not all ranks have entered, their groups are
out of step. NCCL's collectives do not block the thread that calls them.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from outlast.inprocess.abort import interrupt_collectives

log = logging.getLogger("outlast.elastic")

GRACE_S = 3.0
"""How long a thread may take to leave by itself, once the call has failed."""


class CollectiveGuard:
    """A block in which a thread may be in a collective.

    Args:
        over: set when the call has ended for all replicas. If a thread is still in the block then,
            a replica has failed, because this one has not finished.
        grace_s: how long a thread may take to leave by itself then, in seconds.
    """

    def __init__(self, over: threading.Event, grace_s: float = GRACE_S) -> None:
        self._over = over
        self._grace = grace_s
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="outlast-guard", daemon=True)

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
        if not self._left.wait(self._grace):
            log.warning("a replica has failed: the collectives that wait for it are interrupted")
            interrupt_collectives(self._left)
