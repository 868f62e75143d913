"""How often the training function has been left because of a fault, in this process.

`inprocess` counts; others compare. An object that was made before the count changed belongs to an
iteration that is over: a new one may take its place, although the old one was never closed.
"""

from __future__ import annotations

_count = 0


def count() -> int:
    """The count so far. Only its changes mean something."""
    return _count


def record() -> None:
    """Counts: the training function has been left, and may be called again."""
    global _count
    _count += 1
