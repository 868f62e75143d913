"""Interrupts the collectives of this process that are in flight, for other rooms."""

from __future__ import annotations

import threading

from outlast.inprocess.distributed.gloo_abort import GlooAbort

__all__ = ["interrupt_collectives"]

_AGAIN_S = 0.02


def interrupt_collectives(done: threading.Event) -> None:
    """Makes every gloo collective that is in flight in this process raise.

    It shuts down gloo's connections, so the process groups cannot be used afterwards. It goes on
    until `done` is set, since a thread may be about to open a connection, or to wait on one.
    Collectives of NCCL are not touched: they do not block the thread that calls them.

    Args:
        done: set when the threads that were in a collective have left it.
    """
    gloo = GlooAbort()
    while True:
        connected = gloo.shut_down()
        if done.wait(_AGAIN_S):
            return
        gloo.wake_blocked(settled=not connected)
