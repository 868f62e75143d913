"""Told to stop: all ranks stop after the same step, whichever of them was told.

A scheduler that wants its machines back sends a signal, often to one rank alone. Every rank must
then save at the same step, and none may begin a step that others do not take part in: it would
wait in a collective for ever.

No rank asks at every step whether to stop. A thread of each rank waits for the word, as an event;
then the ranks agree:

    1. The rank that was told tells all.
    2. The thread of each rank says how many steps its rank has *begun*. From that moment its rank
       begins no further one: at its next boundary it waits for the decision.
    3. Rank 0 decides: all stop after the greatest of these numbers. A rank that has closed its
       part says so instead of a number, since its training is over: then nobody stops, and that of
       the others ends too.

Why every rank gets there: the rank that said the greatest number D has begun step D, which it can
only end if all others take part; none has promised less than to wait at a boundary for a decision,
and the decision is D. Why none goes beyond: no rank begins a step after it has said its number,
until it knows the decision, and no number is above D.

Who waits in a thread waits on a key of its own rank, so that `close` can end the wait. What rank 0
decides is a claim: it may be closed in the same moment, and all must hear the same.

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

from outlast.coordination.call_ledger import CallFailure, CallLedger
from outlast.errors import CheckpointError, StoreError
from outlast.system.exit_text import signal_name

__all__ = ["Signals", "StopAgreement"]

log = logging.getLogger("outlast.elastic")

_NUMBERS = 0  # the call in which the ranks say what they have begun
_CLOSED = "closed"
_NEVER = float("inf")


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
        self._decided: float | None = None
        self._said = False
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
        """Ends the threads. No step comes any more."""
        self._requests.put(None)
        for thread in self._threads:
            thread.join()

    def _tell(self) -> None:
        """The word goes to each rank by a key of its own, so that each can end its own wait."""
        ledger = self._ledger
        while (why := self._requests.get()) is not None:
            said = {"why": f"rank {ledger.rank} on {socket.gethostname()}: {why}"}
            try:
                for rank in range(ledger.world_size):
                    ledger.conclude(_told(rank), json.dumps(said).encode())
            except StoreError as e:  # nobody hears it, but this rank must not go on as if nothing
                with self._changed:
                    self._told = self._told or said
                self._lose(e)
        with contextlib.suppress(StoreError):  # `_hear` has met it too
            self._leave()

    def _leave(self) -> None:
        ledger = self._ledger
        with self._changed:
            silent, self._said = not self._said, True
        if silent:
            ledger.finish(_NUMBERS, json.dumps(None).encode())
        if ledger.rank == 0:
            ledger.fail(_NUMBERS, CallFailure.here(_NUMBERS, _CLOSED, 0, _CLOSED))
            self._decide(None)
        for index in (_told(ledger.rank), self._decision(ledger.rank)):
            ledger.conclude(index, json.dumps({"why": _CLOSED}).encode())

    def _hear(self) -> None:
        try:
            self._agree()
        except StoreError as e:
            self._lose(e)

    def _agree(self) -> None:
        ledger = self._ledger
        told = json.loads(ledger.await_conclusion(_told(ledger.rank), None))
        with self._changed:
            if told["why"] == _CLOSED or self._said:
                return
            self._told, self._said = told, True
            begun = self._begun
        ledger.finish(_NUMBERS, json.dumps(begun).encode())
        if ledger.rank == 0:
            if ledger.await_verdict(_NUMBERS, None).failure is not None:
                return  # closed
            numbers = [json.loads(part) for part in ledger.parts(_NUMBERS)]
            self._decide(None if None in numbers else max(numbers))
        said = json.loads(ledger.await_conclusion(self._decision(ledger.rank), None))
        with self._changed:
            self._decided = _NEVER if said.get("after") is None else said["after"]
            self._changed.notify_all()

    def _decide(self, after: int | None) -> None:
        """On rank 0."""
        said = self._ledger.agree("decision", json.dumps({"after": after}))
        for rank in range(self._ledger.world_size):
            self._ledger.conclude(self._decision(rank), said.encode())

    def _decision(self, rank: int) -> int:
        return 1 + self._ledger.world_size + rank

    def _lose(self, error: StoreError) -> None:
        with self._changed:
            self._lost = error
            self._changed.notify_all()


def _told(rank: int) -> int:
    return 1 + rank


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
        self._agreement.request(f"signal {signal_name(number)}")

    def close(self) -> None:
        """Gives the handlers back, unless somebody has put others in their place."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._take:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before = {}
