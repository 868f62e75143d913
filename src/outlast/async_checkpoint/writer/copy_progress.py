"""The progress of a copy into a buffer, as the writer knows it: it writes during the copy.

When a writer dies, what it knew of copies is lost. The main process sends `SnapshotSealed` and
`SnapshotTorn` again to its replacement, so no wait for a copy lasts forever.
"""

from __future__ import annotations

import threading


class CopyProgress:
    """The progress of one snapshot's copy."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._upto = 0
        self._torn = False

    def reached(self, upto: int) -> None:
        """Every byte of the buffer before `upto` is final."""
        with self._changed:
            self._upto = max(self._upto, upto)
            self._changed.notify_all()

    def tear(self) -> None:
        """The copy will not be completed."""
        with self._changed:
            self._torn = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Has every `wait_for` check its conditions again."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, upto: int, dropped: threading.Event) -> bool:
        """Waits until the copy has reached `upto`; `False` if it never will, or was dropped."""
        with self._changed:
            self._changed.wait_for(lambda: self._upto >= upto or self._torn or dropped.is_set())
            return self._upto >= upto and not self._torn and not dropped.is_set()
