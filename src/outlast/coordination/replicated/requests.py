"""The operations of this host on their way to the leader: each is repeated until it is answered."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.coordination.replicated.messages import Requests
from outlast.coordination.replicated.operations import (
    MESSAGE_BYTES,
    WAIT,
    Failed,
    Operation,
    Result,
    size_bytes,
)
from outlast.coordination.replicated.timing import Timing


@dataclass
class _Open:
    operation: Operation
    due: float
    delay: float


class OwnRequests:
    """Numbers the operations, repeats them, and collects their results.

    An operation keeps its number for all repetitions. The table performs each number once
    (`table.Session`), also if the leader changes between two of them.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._next = 1
        self._open: dict[int, _Open] = {}
        self._results: list[tuple[int, Result]] = []
        self._tell_waits = False

    def submit(self, operation: Operation, now: float) -> int:
        """Numbers an operation, to be sent with the next message."""
        number = self._next
        self._next += 1
        self._open[number] = _Open(operation, now, self._timing.retry)
        return number

    def cancel(self, number: int) -> None:
        """Forgets an operation. The leader learns which waits there still are."""
        dropped = self._open.pop(number, None)
        if dropped is not None and dropped.operation.name == WAIT:
            self._tell_waits = True

    def answered(self, results: tuple[tuple[int, Result], ...]) -> None:
        """Takes the answers of the leader; repeated ones are ignored."""
        for number, result in results:
            if self._open.pop(number, None) is not None:
                self._results.append((number, result))

    def fail(self, reason: str) -> None:
        """Gives up all operations. They may have been performed."""
        self._results += [(number, Failed(reason)) for number in self._open]
        self._open.clear()

    def results(self) -> list[tuple[int, Result]]:
        """The results since the last call."""
        taken, self._results = self._results, []
        return taken

    def send_again(self, now: float) -> None:
        """A new leader: it knows of no waits, and may not have what was sent to the one before."""
        for pending in self._open.values():
            pending.due, pending.delay = now, self._timing.retry
        self._tell_waits = True

    def due(self) -> float:
        """When `message` has something to send."""
        if self._tell_waits:
            return float("-inf")
        return min((pending.due for pending in self._open.values()), default=float("inf"))

    def message(self, now: float) -> Requests | None:
        """What is to be sent now."""
        if self.due() > now:
            return None
        sending, waits, floor = [], [], self._next - 1
        size = 0
        tell = self._tell_waits
        for number, pending in self._open.items():
            operation = pending.operation
            if operation.name == WAIT:
                waits.append(number)
            elif operation.writes:
                floor = min(floor, number - 1)
            if pending.due <= now and size < MESSAGE_BYTES:  # the rest stays due
                size += size_bytes(operation)
                sending.append((number, operation))
                if operation.name == WAIT:
                    # The leader keeps it. It is repeated rarely, in case that the answer was lost.
                    pending.delay = self._timing.lease / 2
                    tell = True
                pending.due = now + pending.delay
                # A leader that has much to do gets no more to do by repetitions.
                pending.delay = min(2 * pending.delay, self._timing.lease)
        self._tell_waits = False
        return Requests(floor, tuple(sending), tuple(waits) if tell else None)
