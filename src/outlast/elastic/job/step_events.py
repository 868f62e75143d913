"""Writes to the event log which steps a rank has completed, for the goodput of the report."""

from __future__ import annotations

from outlast.events import Emitter, StepsDone

# An event for every step would be too many, and one at the end is not written by a killed process.
_EVERY_S = 10.0


class StepEvents:
    """The steps of one rank since a restore."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self._first = self._last = self._written = 0
        self._due = emitter.clock.now() + _EVERY_S

    def begin(self, step: int) -> None:
        """Starts to count after `step`, which was restored."""
        self.write()
        self._first = self._last = step
        self._written = -1  # that no step was completed since is worth an event too

    def completed(self, step: int) -> None:
        """Notes that `step` is completed; writes an event every ten seconds."""
        self._last = step
        if self._emitter.clock.now() >= self._due:
            self.write()

    def write(self) -> None:
        """Writes an event, unless the last one said the same."""
        self._due = self._emitter.clock.now() + _EVERY_S
        if self._last != self._written:
            self._written = self._last
            self._emitter.emit(StepsDone(first=self._first, last=self._last))
