"""Operations that all ranks carry out together, in steps with the same outcome on all of them.

    ranks = Agreement(ledger, timeout_s, where)
    with ranks.operation():                                # on all ranks
        folder = ranks.gather(None, lambda _: open_it())   # rank 0 works, all ranks get its result
        found = ranks.attempt(lambda: read(folder))        # all ranks work, and fail together

What one rank raises reaches all of them, whatever it is and wherever in the operation it is raised.
A rank that leaves by an exception fails the step that it is in. If the others have finished their
parts of that step already, it fails the next one, at which they wait for this rank. So they raise
too, at once: they do not wait for a rank that does not come until their time is over.

A restart in place is no such exception: it interrupts all ranks, and its store goes away.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from outlast.coordination.call_ledger import CallFailure, CallLedger
from outlast.coordination.stores.store import KeyTimeout
from outlast.errors import (
    CheckpointError,
    CheckpointMismatch,
    CheckpointReadError,
    CheckpointUnsavable,
    FolderInUse,
    FolderUnusable,
    OutlastError,
    RankExcluded,
    RankShouldRestart,
    RestartAbort,
    StoreError,
)

T = TypeVar("T")

MISFIT = "misfit"
"""The name of a failure with which the restore ends: the checkpoint is valid, but does not fit."""
UNREAD = "unread"
"""The same: the checkpoint cannot be read now, and may be valid."""
_LEFT = "left"
"""The name of the failure of a rank that has left the operation, by an exception of its own."""
_KINDS = {
    kind.__name__: kind
    for kind in (CheckpointMismatch, CheckpointReadError, FolderInUse, FolderUnusable)
}
OF_ALL_RANKS = (RankShouldRestart, RankExcluded, RestartAbort)
"""What interrupts all ranks, so that none has to tell the others."""


class Agreement:
    """One rank's part in the agreement. All ranks take the same steps in the same order. `ledger`
    is used for nothing else; `where`, the directory of the checkpoints, is for errors.
    """

    def __init__(self, ledger: CallLedger, timeout_s: float, where: str) -> None:
        self.rank = ledger.rank
        self.world_size = ledger.world_size
        self._ledger = ledger
        self._timeout = timeout_s
        self._where = where
        self._steps = 0  # begun
        self._ended = 0  # of those; so an interrupt finds this rank before, in or after a step
        self._concludes = False  # whether the others wait for this rank's result of the step
        self._depth = 0
        self._shared: BaseException | None = None  # raised on all ranks

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        """A block of steps, and of work between them: see the module. A step alone is one too."""
        self._depth += 1
        try:
            yield
        except BaseException as e:
            if self._depth == 1 and e is not self._shared and not isinstance(e, OF_ALL_RANKS):
                self._leave(e)
            raise
        finally:
            self._depth -= 1
            if not self._depth:
                self._shared = None  # it refers to this frame

    def attempt(self, work: Callable[[], T]) -> T | CallFailure:
        """Runs `work` on every rank. Returns what `work` returned on this rank; or, if it raised a
        `CheckpointError` or an `OSError` on any, the failure of one, the same on all.

        Raises:
            BaseException: what else `work` raised here.
            CheckpointError: if it raised something else on another rank, or that rank has left the
                operation; names rank, host and cause.
        """
        with self.operation():
            index, ledger = self._begin(), self._ledger
            result: T | None = None
            try:
                result = work()
            except (CheckpointError, OSError) as e:
                kinds = {
                    CheckpointMismatch: MISFIT,
                    CheckpointUnsavable: MISFIT,  # the state to fill
                    CheckpointReadError: UNREAD,
                }
                name = next((kinds[kind] for kind in kinds if isinstance(e, kind)), "")
                ledger.fail(index, CallFailure.here(index, name, self.rank, str(e)))
            else:
                ledger.finish(index)
            failure = self._await(lambda: ledger.await_verdict(index, self._timeout)).failure
            self._end()
            if failure is not None and failure.name == _LEFT:
                raise self._as_shared(CheckpointError(_text(failure)), failure.rank)
            return result if failure is None else failure  # type: ignore[return-value]

    def gather(self, part: Any, work: Callable[[list[Any]], T]) -> T:
        """Runs `work` on rank 0, on the parts of all ranks in rank order; returns its result on
        every rank. Parts and result are JSON.

        Raises:
            BaseException: what `work` raised here, on rank 0; an `OSError` as a `CheckpointError`.
            CheckpointError: if it raised on rank 0, or a rank has left the operation; names rank
                and cause, and on the other ranks is `of_another_rank`.
        """
        with self.operation():
            if self.world_size == 1:
                try:
                    result = json.loads(json.dumps(work([json.loads(json.dumps(part))])))
                except OSError as e:
                    raise CheckpointError(f"rank 0: {e}") from e
                return result  # type: ignore[no-any-return]
            index, ledger, own = self._begin(concludes=self.rank == 0), self._ledger, ""
            ledger.finish(index, json.dumps(part).encode())
            if self.rank == 0:
                failure = self._await(lambda: ledger.await_verdict(index, self._timeout)).failure
                answer: dict[str, Any] = {}
                try:
                    if failure is None:
                        answer["is"] = work([json.loads(each) for each in ledger.parts(index)])
                    else:
                        answer = {"error": _text(failure), "rank": failure.rank}
                except (CheckpointError, OSError) as e:
                    own = str(e)
                    answer = {"error": f"rank 0: {own}", "rank": 0, "kind": type(e).__name__}
                ledger.conclude(index, json.dumps(answer).encode())
            answer = json.loads(self._await(lambda: ledger.await_conclusion(index, self._timeout)))
            self._end()
            if "error" in answer:
                kind = _KINDS.get(answer.get("kind", ""), CheckpointError)
                raise self._as_shared(kind(own or answer["error"]), answer["rank"])
            return answer["is"]  # type: ignore[no-any-return]

    def exchange(self, part: Any) -> list[Any]:
        return self.gather(part, list)

    def _begin(self, *, concludes: bool = False) -> int:
        self._concludes = concludes
        self._steps += 1
        return self._steps

    def _end(self) -> None:
        self._ended = self._steps
        self._ledger.forget(self._steps)

    def attributed(self, error: CheckpointError, failed: int) -> CheckpointError:
        """`error`, which all ranks raise because the rank `failed` has failed."""
        error.of_another_rank = failed != self.rank
        return error

    def _as_shared(self, error: CheckpointError, failed: int) -> CheckpointError:
        self._shared = error
        return self.attributed(error, failed)

    def _await(self, wait: Callable[[], T]) -> T:
        try:
            return wait()
        except KeyTimeout as e:
            raise CheckpointError(
                f"rank {self.rank} waits for the other ranks at the checkpointer of "
                f"{self._where}; not all came within {self._timeout:g} s"
            ) from e

    def _leave(self, error: BaseException) -> None:
        """This rank leaves by an exception; all ranks count the step in which they learn of it."""
        if self.world_size == 1:
            return
        if isinstance(error, OutlastError):
            failure = CallFailure.here(self._steps, _LEFT, self.rank, str(error))
        else:
            failure = CallFailure.of(error, self._steps, _LEFT, self.rank)
        # A store that is out of reach is out of reach for the others too.
        with contextlib.suppress(StoreError):
            if not (self._ended < self._steps and self._fail_step(failure)):
                self._begin()
                self._fail_step(failure)

    def _fail_step(self, failure: CallFailure) -> bool:
        """Fails the step that this rank is in; returns whether the other ranks learn of a failure
        there. If all ranks have finished their parts, they do not, unless they wait for the result
        of this one. They may wait for the verdict or for the result, so it is recorded for both.
        """
        index, ledger = self._steps, self._ledger
        ledger.fail(index, failure)
        told = ledger.await_verdict(index, None).failure  # there is one now
        # An interrupt may have come after the result was sent.
        if told is None and self._concludes and ledger.conclusion(index) is None:
            told = failure
        if told is None:
            # Its keys stay: the coordinator may not have read this rank's part yet.
            self._ended = index
            return False
        ledger.conclude(index, json.dumps({"error": _text(told), "rank": told.rank}).encode())
        self._end()
        return True


def _text(failure: CallFailure) -> str:
    text = f"rank {failure.rank} on {failure.host}: {failure.cause}"
    return f"{text}\n{failure.traceback.rstrip()}" if failure.traceback else text
