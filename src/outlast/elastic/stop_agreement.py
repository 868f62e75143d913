"""Preemption: on a request to stop, all ranks stop after the same step.

No rank may begin a step that others do not join: it would block in a collective. No rank polls for
a request. A thread of each rank waits for one on the store; then the ranks agree:

    1. The rank that received the request forwards it to all ranks.
    2. The thread of each rank reports how many steps its rank has *begun*. From then on every rank
       stops at a step boundary until the decision arrives.
    3. Rank 0 decides: all ranks stop after D steps, the greatest number reported. A rank whose
       training loop is over reports this instead of a number: no rank is stopped then.

Why every rank reaches D: a rank that reported D has begun step D, and completes it only if all
others take part in it. A rank that reported less waits at a boundary only until the decision
arrives, and since the decision is D, it continues. Why no rank passes D: no rank begins a step
between its report and the decision, and no report is greater than D. A lock makes "begin a step"
and "report" mutually exclusive.

Rank 0's decision is a claim, because rank 0 may close at the same time.

Ranks that are to leave or join while the others go on are agreed on in the same way; rank 0
requests it, and the decision says so. If a stop is requested meanwhile, one of the two is decided:
a stop that comes second is known to the next iteration (`stop_signals`), and there is none after a
stop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
from typing import Any

import msgspec

from outlast.coordination.call_ledger import CallFailure, CallLedger, Round
from outlast.coordination.moves import LeaveRequest
from outlast.coordination.waits import waits
from outlast.errors import CheckpointError, StoreError

_CLOSED = "closed"
_NEVER = float("inf")


class StopAgreement:
    """One rank's part, with the ledger to itself; `begun`: its steps, including the next one."""

    def __init__(self, ledger: CallLedger, begun: int) -> None:
        self.reason = ""  # which rank received the request, and why
        self.leave: LeaveRequest | None = None  # once a last step is agreed: not a stop, but this
        self._patient = False  # a step may be long, and a job from which ranks leave can wait
        self._ledger, self._begun = ledger, begun
        self._reports = ledger.round(0, "begun")  # how many steps each rank has begun
        self._last_step: float | None = None
        self._reported = False
        self._store_error = ""  # not the exception: its traceback leads back here
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._agree, name="outlast-stop-rx", daemon=True)
        self._thread.start()

    def request(self, reason: str, leave: LeaveRequest | None = None) -> None:
        """Requests a stop, or on rank 0 that ranks leave, under each rank's own key; from one
        thread at a time for each of the two, before `close`.
        """
        where = f"rank {self._ledger.rank} on {socket.gethostname()}: "
        reason = reason if leave is not None else f"{where}{reason}"
        asked = {"why": reason, "leave": leave and dataclasses.asdict(leave)}
        try:
            for rank in range(self._ledger.world_size):
                self._told("asked", rank).conclude(json.dumps(asked).encode())
        except StoreError as e:  # the others may miss it, but this rank must not ignore it
            with self._changed:
                self.reason = self.reason or reason
            self._fail(e)

    def is_last(self, step: int, timeout: float) -> bool:
        """Whether `step` was the last one. Call it after each step, before the next one begins. A
        `CheckpointError` if the other ranks do not answer a request to stop within `timeout`
        seconds.
        """
        with self._changed:
            if self.reason:
                with waits():
                    answered = self._changed.wait_for(
                        lambda: self._last_step is not None or bool(self._store_error),
                        None if self._patient else timeout,
                    )
                if self._last_step is None:
                    no_answer = f"not all ranks answered within {timeout:g} s"
                    cause = self._store_error if answered else no_answer
                    raise CheckpointError(f"told to stop ({self.reason}), but {cause}")
                if step >= self._last_step:
                    return True
            self._begun = step + 1
            return False

    def close(self) -> None:
        """Call it when this rank will begin no more steps: reports that, and ends the thread."""
        ledger = self._ledger
        with self._changed:
            unreported, self._reported = not self._reported, True
        with contextlib.suppress(StoreError):  # the thread has the same error, and ends
            if unreported:
                self._reports.finish(json.dumps(None).encode())
            if ledger.rank == 0:
                self._reports.fail(CallFailure.here(0, _CLOSED, 0, _CLOSED))
                self._decide(None)
            for of in ("asked", "decided"):
                self._told(of, ledger.rank).conclude(json.dumps({"why": _CLOSED}).encode())
        self._thread.join()

    def _agree(self) -> None:
        """In the thread: waits for a request, reports this rank's steps, awaits the decision."""
        ledger = self._ledger
        try:
            asked = json.loads(self._told("asked", ledger.rank).await_conclusion(None))
            reason = asked["why"]
            with self._changed:
                if reason == _CLOSED or self._reported:
                    return
                self.reason, self._reported = reason, True
                self._patient = asked.get("leave") is not None
                begun = self._begun
            self._reports.finish(json.dumps(begun).encode())
            if ledger.rank == 0:
                if self._reports.await_verdict(None).failure is not None:
                    return  # closed
                reports = [json.loads(part) for part in self._reports.parts()]
                self._decide(None if None in reports else max(reports), asked["leave"])
            decision = json.loads(self._told("decided", ledger.rank).await_conclusion(None))
        except StoreError as e:
            self._fail(e)
            return
        with self._changed:
            if (leave := decision.get("leave")) is not None:
                self.leave = msgspec.convert(leave, LeaveRequest)
            self._last_step = _NEVER if decision.get("after") is None else decision["after"]
            self._changed.notify_all()

    def _decide(self, last_step: int | None, leave: dict[str, Any] | None = None) -> None:
        """Publishes the decision, on rank 0; `None`: no rank stops."""
        decided = json.dumps({"after": last_step, "leave": leave})
        decision = self._ledger.agree("decision", decided)
        for rank in range(self._ledger.world_size):
            self._told("decided", rank).conclude(decision.encode())

    def _told(self, of: str, rank: int) -> Round:
        """What one rank is told, under a key of its own: that it is asked, or what is decided."""
        return self._ledger.round(rank, of)

    def _fail(self, error: StoreError) -> None:
        with self._changed:
            self._store_error = str(error)
            self._changed.notify_all()
