"""Ranks that leave or join a training at the end of a step, while the others go on: a move.

Rank 0 passes requests (`coordination.moves`) to the agreement on a last step, which all ranks take
part in (`LeaveWatch`). After that step, all wait for the saves in progress. A rank that leaves
keeps its state for its successor; if a rank cannot, or nobody is there to take it, all save instead
(`leave`). Nothing of a step is lost, as no rank ends the iteration before all have come so far.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NoReturn, Protocol

from outlast.async_checkpoint import Checkpointer
from outlast.coordination.moves import LeaveRequest
from outlast.elastic.stop_agreement import StopAgreement
from outlast.errors import CheckpointError, InternalError, RankMoved, StoreError
from outlast.inprocess.running_call import RunningCall, long_phase
from outlast.system.error_text import first_line
from outlast.system.notices import notice

log = logging.getLogger("outlast.elastic")


class LiveState(Protocol):
    """The state of a rank in memory."""

    def freeze(self, *, succeeded: bool) -> bool:
        """Keeps the state of the present step; returns whether the next iteration can continue from
        it: with the same number of ranks, or with fewer if the rank is not `succeeded`.
        """

    def hand_over(self) -> None:
        """Serves the frozen state to the successor of this rank, until that has it."""


class LeaveWatch:
    """On rank 0 of an iteration: waits for requests that ranks leave or join."""

    def __init__(self, call: RunningCall, agreement: StopAgreement) -> None:
        self._call, self._agreement = call, agreement
        self._number, self._closed, self._lock = 0, False, threading.Lock()
        self._thread = threading.Thread(target=self._run, name="outlast-leave-rx", daemon=True)
        self._thread.start()

    def close(self) -> None:
        try:
            with self._lock:
                self._closed = True
                self._call.end_wait_for_leave_request(self._number)
        except StoreError as e:  # the thread has the same error, and ends
            log.debug("the wait for requests to leave: %s", e)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._call.begin_to_wait_for_leave_requests()
            while True:
                number, request = self._call.leave_requests()
                with self._lock:
                    if self._closed:
                        return
                    self._number = number
                if request is not None:
                    self._agreement.request(request.reason, request)
                    return  # the iteration ends with it
                self._call.await_leave_request(number)
        except StoreError as e:
            log.debug("requests to leave are not seen any more: %s", e)


def leave(
    request: LeaveRequest,
    call: RunningCall,
    checkpointer: Checkpointer,
    step: int,
    limit_s: float,
    save: Callable[[], object],
    live: LiveState | None,
) -> NoReturn:
    """All ranks call this after the agreed step: raises `RankMoved` on those that leave, and
    interrupts the others for the next iteration, which admits those that join.
    """
    ranks, leaves = checkpointer.ranks, call.member in request.members
    with long_phase(2 * limit_s or None):
        _try(lambda: checkpointer.wait(limit_s), "a save before the move failed: %s")
        frozen = live is not None and live.freeze(succeeded=request.succeeded)
        found = ranks.exchange((frozen, leaves))
        if request.saves or not all(each for each, _ in found):
            # If that fails, those that stay continue from what they have, as after a fault.
            text = f"step {step} could not be saved before the move, and may be made again: %s"
            _try(save, text)
            _try(lambda: checkpointer.wait(limit_s), text)
            ranks.exchange(None)
        gone = [rank for rank, (_, each) in enumerate(found) if each]
        text = "rank%s %s leave%s after step %d: %s"
        s, has = ("", "s") if len(gone) == 1 else ("s", "")
        names = ", ".join(map(str, gone))
        first = checkpointer.rank == 0
        if gone:
            notice(log, text, s, names, has, step, request.reason, shown=first)
        elif first:
            how = "grows" if request.joiners else "goes on without ranks of the reserve"
            notice(log, "the job %s after step %d: %s", how, step, request.reason)
            call.end_iteration_to_grow()
        if leaves:
            call.moved = RankMoved(request.reason)
            if frozen and live is not None and request.succeeded:
                live.hand_over()
            raise call.moved
    assert call.wrapper is not None
    call.wrapper.await_restart()
    raise InternalError("no restart has followed the end of an iteration in which ranks left")


def _try(work: Callable[[], object], text: str) -> None:
    try:
        work()
    except (CheckpointError, TimeoutError) as e:
        log.error(text, first_line(e))
