"""Told to stop: all ranks stop after the same step, whichever of them was told.

A scheduler that wants its machines back sends a signal, often to one rank alone. Every rank must
then save at the same step, and none may begin a step that others do not take part in: it would
wait in a collective for ever.

No rank asks at every step whether to stop. A thread of each rank waits for the word, as an event;
then the ranks agree:

    1. The rank that was told tells all.
    2. The thread of each rank says how many steps its rank has *begun*. From that moment its rank
       begins no further one: at its next boundary it waits for the decision.
    3. Rank 0 decides: all stop after the greatest of these numbers.

Why every rank gets there: the rank that said the greatest number D has begun step D, which it can
only end if all others take part; none has promised less than to wait at a boundary for a decision,
and the decision is D. Why none goes beyond: no rank begins a step after it has said its number,
until it knows the decision, and no number is above D.

The lock makes "begun" and "said" exclude each other: either the rank begins the step before it
says its number, which then counts it, or it sees that it must wait.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import signal
import socket
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from outlast.async_checkpoint.ledger import CallLedger
from outlast.errors import CheckpointError, StoreError

__all__ = ["Signals", "StopAgreement"]

log = logging.getLogger("outlast.elastic")

_NUMBERS = 0  # the call in which the ranks say what they have begun
_CLOSED = "closed"


class StopAgreement:
    """One rank's part in it.

    Args:
        ledger: of its own.
        begun: how many steps this rank has begun: those before, and the first.
    """

    def __init__(self, ledger: CallLedger, begun: int) -> None:
        self._ledger = ledger
        self._begun = begun
        self._told: dict[str, Any] | None = None
        self._decided: int | None = None
        self._lost: StoreError | None = None
        self._changed = threading.Condition()
        self._requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._tell, name="outlast-stop-tell", daemon=True),
            threading.Thread(target=self._hear, name="outlast-stop-hear", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def reason(self) -> str:
        """Who was told, and by what."""
        return "" if self._told is None else str(self._told["why"])

    def request(self, why: str) -> None:
        """This rank was told to stop. Any thread may say so, and a signal handler."""
        self._requests.put(why)

    def ends_after(self, step: int, timeout: float) -> bool:
        """At the boundary after `step`, before the next one begins: whether this was the last.

        Args:
            step: how many steps are complete.
            timeout: how long to wait for the other ranks, in seconds, once one was told.

        Raises:
            CheckpointError: if they do not answer in time.
        """
        with self._changed:
            if self._told is None:
                self._begun = step + 1
                return False
            known = self._changed.wait_for(
                lambda: self._decided is not None or self._lost is not None, timeout
            )
            if self._decided is None:
                why = self._lost if known else f"not all ranks answered within {timeout:g} s"
                raise CheckpointError(f"told to stop ({self.reason}), but {why}")
            if step >= self._decided:
                return True
            self._begun = step + 1
            return False

    def close(self) -> None:
        """Ends the threads."""
        self._requests.put(None)
        for thread in self._threads:
            thread.join()

    def _tell(self) -> None:
        """The word goes to each rank by a key of its own, so that each can end its own wait."""
        ledger = self._ledger
        while (why := self._requests.get()) is not None:
            said = {"why": f"rank {ledger.rank} on {socket.gethostname()}: {why}"}
            with contextlib.suppress(StoreError):  # `_hear` has met it too
                for rank in range(ledger.world_size):
                    ledger.conclude(1 + rank, json.dumps(said).encode())
        with contextlib.suppress(StoreError):
            ledger.conclude(1 + ledger.rank, json.dumps({"why": _CLOSED}).encode())

    def _hear(self) -> None:
        try:
            self._agree()
        except StoreError as e:
            with self._changed:
                self._lost = e
                self._changed.notify_all()

    def _agree(self) -> None:
        ledger = self._ledger
        told = json.loads(ledger.await_conclusion(1 + ledger.rank, None))
        if told["why"] == _CLOSED:
            return
        with self._changed:
            self._told = told
            begun = self._begun
        ledger.finish(_NUMBERS, json.dumps(begun).encode())
        if ledger.rank == 0:
            ledger.await_verdict(_NUMBERS, None)
            decided = max(json.loads(part) for part in ledger.parts(_NUMBERS))
            ledger.conclude(_NUMBERS, json.dumps(decided).encode())
        decided = int(json.loads(ledger.await_conclusion(_NUMBERS, None)))
        with self._changed:
            self._decided = decided
            self._changed.notify_all()


class Signals:
    """Turns signals into requests to stop, and gives the handlers back.

    The second signal of a kind does what it would have done without: whoever sends it twice does
    not want to wait.

    Args:
        numbers: of the signals.
        agreement: that is told.
    """

    def __init__(self, numbers: Iterable[int], agreement: StopAgreement) -> None:
        self._agreement = agreement
        self._before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            log.info("signals are not looked at: only the main thread can take them")
            return
        for number in numbers:
            self._before[number] = signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        before = self._before.pop(number, signal.SIG_DFL)
        signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._agreement.request(f"signal {signal.Signals(number).name}")

    def close(self) -> None:
        """Gives the handlers back, unless somebody has put others in their place."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._take:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before = {}
