"""Freezes the heap of the program for the length of a wrapped call.

Objects that exist when the call begins are left out of garbage collections until it ends. That has
two effects. A collection after a restart takes as long as the objects of one iteration need, not
those of the whole program. And the pages that the monitor process shares with its parent stay
shared: a collection writes to the header of every object that it visits, so the first one after the
fork would copy all of the heap, once in each process.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Freezes the heap, unless the program has frozen it by itself; undone at the end, unless the
    program froze objects of its own meanwhile: to unfreeze would then undo that too.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()  # else the garbage of this moment would stay for the length of the call
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        yield
    finally:
        if gc.get_freeze_count() <= frozen:
            gc.unfreeze()
