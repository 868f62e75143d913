"""Freezes the program's heap for the duration of a wrapped call.

Objects that exist when the call begins are excluded from garbage collection until it ends. This has
two effects. A collection after a restart takes time only for the objects of one iteration, not for
those of the whole program. And the pages that the monitor process shares with its parent stay
shared: a collection writes to the header of every object that it visits, so the first one after the
fork would copy the whole heap, once in each process.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Freezes the heap, unless the program has already frozen it; undone at the end, unless the
    program froze more objects in the meantime, because unfreezing would undo that too.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()  # otherwise present garbage would stay for the duration of the call
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        yield
    finally:
        if gc.get_freeze_count() <= frozen:
            gc.unfreeze()
