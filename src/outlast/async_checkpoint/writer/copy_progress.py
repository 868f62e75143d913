"""How far a snapshot has been copied, as the writer knows it: it writes beside the copy.

What a writer was told is lost with it when it dies, but for the end: `sealed` and `torn` are said
again to the one that takes its place. So nobody waits for ever for what was said before.
"""

from __future__ import annotations

import threading

__all__ = ["CopyProgress"]


class CopyProgress:
    """Of one snapshot."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._upto = 0
        self._torn = False

    def reached(self, upto: int) -> None:
        """Every byte of the memory before `upto` is as it will be."""
        with self._changed:
            self._upto = max(self._upto, upto)
            self._changed.notify_all()

    def tear(self) -> None:
        """There will be no more of it."""
        with self._changed:
            self._torn = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Has those who wait look at what else they wait for."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, upto: int, dropped: threading.Event) -> bool:
        """Waits until it is filled up to there; `False` if it never will be, or was dropped."""
        with self._changed:
            self._changed.wait_for(lambda: self._upto >= upto or self._torn or dropped.is_set())
            return self._upto >= upto and not self._torn and not dropped.is_set()
