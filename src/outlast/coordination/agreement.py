"""Operations that all ranks carry out together, in steps with the same outcome on all of them.

    ranks = Agreement(ledger, timeout_s, where)
    with ranks.operation():                                # on all ranks
        folder = ranks.gather(None, lambda _: open_it())   # rank 0 works, all ranks get its result
        found = ranks.attempt(lambda: read(folder))        # all ranks work, and fail together

What one rank raises reaches all of them, whatever it is and wherever in the operation it is raised.
A rank that leaves by an exception fails the step that it is in. If the others have finished their
parts of that step already, it fails the next one, at which they wait for this rank. So they raise
too, at once: they do not wait for a rank that does not come until their time is over. If a rank
does not come, and nothing is known of it, the step fails on all ranks when the time of the first
one is over, with an error that names the missing ranks.

A rank whose work is a collective may wait in it for one that has failed, for the timeout of its
process group: `attempt(..., collective=True)` ends the collectives then.

A restart in place is no such exception: it interrupts all ranks, and its store goes away.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from outlast.coordination.call_ledger import CallFailure, CallLedger, Round, Verdict
from outlast.coordination.collective_guard import CollectiveGuard
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
from outlast.system.units import late_text

T = TypeVar("T")
E = TypeVar("E", bound=OutlastError)
Own = TypeVar("Own")

MISFIT = "misfit"
"""The name of a failure with which the restore ends: the checkpoint is valid, but does not fit."""
UNREAD = "unread"
"""The same: the checkpoint cannot be read now, and may be valid."""
_LEFT = "left"
"""The name of the failure of a rank that has left the operation, by an exception of its own."""
_LATE = "late"
"""The name of the failure of a step to which a rank did not come in time."""
_READ_S = 30.0
"""How long rank 0 waits until the others have read its last result."""
_KINDS = {
    kind.__name__: kind
    for kind in (CheckpointMismatch, CheckpointReadError, FolderInUse, FolderUnusable)
}
_NAMES = {
    CheckpointMismatch: MISFIT,
    CheckpointUnsavable: MISFIT,  # the state to fill
    CheckpointReadError: UNREAD,
}
OF_ALL_RANKS = (RankShouldRestart, RankExcluded, RestartAbort)
"""What interrupts all ranks, so that none has to tell the others."""


class Agreement:
    """One rank's part in the agreement. All ranks take the same steps in the same order.

    Args:
        ledger: is used for nothing else.
        timeout_s: how long each wait for the other ranks may take.
        where: the directory of the checkpoints, for errors.
        late: the kind of the error if a rank does not come in time.
        interrupt: ends the collectives in which a thread of this process waits, until the event
            that it gets is set. The process groups cannot be used afterwards.
    """

    def __init__(
        self,
        ledger: CallLedger,
        timeout_s: float,
        where: str,
        *,
        late: type[OutlastError] = CheckpointError,
        interrupt: Callable[[threading.Event], None] | None = None,
    ) -> None:
        self.rank = ledger.rank
        self.world_size = ledger.world_size
        self.timeout_s = timeout_s
        self._ledger = ledger
        self._where = where
        self._late = late
        self._interrupt = interrupt
        self._guard: CollectiveGuard | None = None  # of the step that this rank is in
        self._steps = 0  # begun
        self._step: Round | None = None  # the one that this rank is in; an interrupt finds it
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

    def attempt(
        self, work: Callable[[], T], what: str = "", *, collective: bool = False
    ) -> T | CallFailure:
        """Runs `work` on every rank (in errors: `what`). Returns what `work` returned on this rank;
        or, if it raised a `CheckpointError` or an `OSError` on any, the failure of one, the same on
        all. `collective`: it may wait for other ranks in collectives, which are ended if one fails.

        Raises:
            BaseException: what else `work` raised here.
            CheckpointError: if it raised something else on another rank, or that rank has left the
                operation; names rank, host and cause. The kind `late` if a rank did not come.
        """
        with self.operation():
            step = self._begin()
            result: T | None = None
            if collective and self._interrupt is not None and self.world_size > 1:
                self._guard = CollectiveGuard(step, self._interrupt)
            try:
                with self._guard or contextlib.nullcontext():
                    result = work()
            except (CheckpointError, OSError) as e:
                with self._unless_failed():
                    step.fail(self._of_work(e))
            else:
                with self._unless_failed():
                    step.finish(b"{}")  # says that this rank has come: see `_fail_late`
            failure = self._verdict(step, what).failure
            self._end()
            if failure is not None and "error" in (answer := _answer(failure)):
                raise self._error(answer)
            return result if failure is None else failure  # type: ignore[return-value]

    def together(self, work: Callable[[], T], what: str = "", *, collective: bool = False) -> T:
        """As `attempt`, but a failure is raised, on all ranks: a `CheckpointError` that names what
        has failed, rank, host and cause.
        """
        causes: list[Exception] = []

        def noted() -> T:
            try:
                return work()
            except Exception as e:
                causes.append(e)
                raise

        with self.operation():
            outcome = self.attempt(noted, what, collective=collective)
            if not isinstance(outcome, CallFailure):
                return outcome
            try:
                error = self.shared(CheckpointError(self._failed(what, outcome)), outcome.rank)
                raise error from (causes[0] if causes else None)
            finally:
                causes.clear()  # breaks the cycles from the exceptions to this frame
                del error

    def gather(
        self, part: Any, work: Callable[[list[Any]], T], what: str = "", *, until_read: bool = False
    ) -> T:
        """Runs `work` on rank 0 (in errors: `what`), on the parts of all ranks in rank order;
        returns its result on every rank. Parts and result are JSON. `until_read`: rank 0, which may
        serve the store and end afterwards, stays for a limited time until the others have read it.

        Raises:
            BaseException: what `work` raised here, on rank 0; an `OSError` as a `CheckpointError`.
            CheckpointError: if it raised on rank 0, or a rank has left the operation; names rank
                and cause, and on the other ranks is `of_another_rank`. The kind `late` if a rank
                did not come.
        """
        found = self.attempt_and_gather(lambda: (None, part), work, what, until_read=until_read)
        assert not isinstance(found, CallFailure)
        return found[1]

    def attempt_and_gather(
        self,
        prepare: Callable[[], tuple[Own, Any]],
        work: Callable[[list[Any]], T],
        what: str = "",
        *,
        until_read: bool = False,
    ) -> tuple[Own, T] | CallFailure:
        """`attempt` of `prepare`, and `gather`, in one step. `prepare` returns a value of this rank
        and its part for `work`. Returns that value and the result of `work`, or the failure.
        """
        with self.operation():
            step = self._begin(concludes=self.rank == 0)
            read = self._ledger.round(step.index, "read") if until_read else None
            cause: Exception | None = None
            own, answer = None, dict[str, Any]()
            try:
                own, part = prepare()
            except (CheckpointError, OSError) as e:
                step.fail(self._of_work(e))
            else:
                step.finish(json.dumps(part).encode())
            if self.rank == 0:
                failure = self._verdict(step, what).failure
                try:
                    parts = [] if failure else [json.loads(each) for each in step.parts()]
                    answer = _answer(failure) if failure else {"is": work(parts)}
                except (CheckpointError, OSError) as e:
                    cause, answer = e, self._own_answer(e, what)
                payload = json.dumps(answer).encode()
                step.conclude(payload)
            else:
                payload = self._conclusion(step, what, read)
            answer = json.loads(payload)
            if read is not None and "is" in answer:
                answer = self._await_readers(read) or answer
            self._end()
            try:
                if "failure" in answer:
                    return CallFailure(**answer["failure"])
                if isinstance(cause, CheckpointError) and not what:
                    raise self.shared(cause, 0)
                if "error" in answer:
                    raise self._error(answer, "" if what or not cause else str(cause)) from cause
                return own, answer["is"]  # type: ignore[return-value]
            finally:
                cause = None  # breaks the cycle from the exception to this frame

    def exchange(self, part: Any) -> list[Any]:
        return self.gather(part, list)

    def give_up(self, why: str) -> None:
        """Ends the wait of another thread of this rank, which no rank will answer any more."""
        step = self._step
        if step is not None:
            failure = CallFailure.here(step.index, _LEFT, self.rank, why)
            with contextlib.suppress(StoreError):  # it has ended all waits
                step.fail(failure)
                self._conclude(step, failure)

    def _begin(self, *, concludes: bool = False) -> Round:
        self._concludes = concludes
        self._guard = None
        # In this order: an interrupt in between fails this very step, see `_leave`.
        self._step = self._ledger.round(self._steps)
        self._steps += 1
        return self._step

    def _end(self) -> None:
        if self._guard is not None:
            self._guard.end()  # it must not wait for a key that is deleted now
        step, self._step = self._step, None
        assert step is not None
        step.forget()

    def attributed(self, error: E, failed: int) -> E:
        """`error`, which all ranks raise as `failed` has failed."""
        error.of_another_rank = failed != self.rank
        return error

    def shared(self, error: E, failed: int) -> E:
        """`attributed`, for an error that this rank raises in the operation, as all ranks do."""
        self._shared = error
        return self.attributed(error, failed)

    def _of_work(self, error: Exception) -> CallFailure:
        """The failure of what all ranks attempt, from what this one has raised."""
        name = next((name for kind, name in _NAMES.items() if isinstance(error, kind)), "")
        return CallFailure.here(self._steps, name, self.rank, str(error))

    def _error(self, answer: Mapping[str, Any], own: str = "") -> OutlastError:
        """The error that all ranks raise; `own` is its text where it happened, if that differs."""
        kind = _KINDS.get(answer["kind"], CheckpointError)
        error = (self._late if answer["kind"] == _LATE else kind)(own or answer["error"])
        return self.shared(error, answer["rank"])

    def _own_answer(self, error: Exception, what: str) -> dict[str, Any]:
        """What rank 0 tells the others when its work has failed."""
        failure = CallFailure.here(self._steps, what, 0, str(error))
        text = self._failed(what, failure) if what else f"rank 0: {error}"
        return {"error": text, "rank": 0, "kind": type(error).__name__}

    def _failed(self, what: str, failure: CallFailure) -> str:
        """Says that the step `what` has failed, where and why."""
        place = f" on rank {failure.rank} on {failure.host}" if self.world_size > 1 else ""
        return f"{what} failed{place}: {failure.cause}" if what else failure.text

    @contextlib.contextmanager
    def _unless_failed(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            # Another rank has failed, and the store ended with it, but its failure was received
            # before that.
            if self._guard is None or not self._guard.has_verdict.is_set():
                raise

    def _verdict(self, step: Round, what: str) -> Verdict:
        try:
            if self._guard is not None:
                return self._guard.verdict(self.timeout_s)
            return step.await_verdict(self.timeout_s)
        except KeyTimeout:
            return self._fail_late(step, what)

    def _conclusion(self, step: Round, what: str, read: Round | None) -> bytes:
        try:
            return step.await_conclusion(self.timeout_s)
        except KeyTimeout as e:
            failure = self._fail_late(step, what).failure
            if failure is None:  # rank 0 is still at work
                text = late_text(f"{what or 'the work'} on rank 0", [0], self.timeout_s, self.rank)
                if read is None:
                    raise self._late(text) from e  # rank 0 learns of it in the next step
                failure = CallFailure.here(step.index, _LATE, self.rank, text)
                read.fail(failure)  # rank 0 fails, too, when it waits for its readers
                read.forget()
                return json.dumps(_answer(failure)).encode()
            return self._conclude(step, failure)  # rank 0 may never come

    def _await_readers(self, read: Round) -> dict[str, Any] | None:
        """This rank has the result. Returns, on rank 0, the failure of a rank that has not waited
        for it. Not a step: a rank that is interrupted here is noticed at the next one.
        """
        failure = None
        with contextlib.suppress(StoreError):  # one may have ended already
            read.finish()
            if self.rank == 0:
                with contextlib.suppress(KeyTimeout):
                    failure = read.await_verdict(min(self.timeout_s, _READ_S)).failure
            read.forget()
        return None if failure is None else _answer(failure)

    def _fail_late(self, step: Round, what: str) -> Verdict:
        """The time of this rank is over: the step has failed on all ranks, if it has not ended
        otherwise at the last moment.

        The missing ranks are those without a part. A rank deletes its part only when it has the
        verdict; so if that is the one which is claimed here, all parts were still there.
        """
        if step.verdict() is None:
            missing = [r for r, part in enumerate(step.parts_so_far()) if not part]
            missing = missing or [r for r in range(self.world_size) if r != self.rank]
            what = what or f"the checkpointer of {self._where}"
            text = late_text(what, missing, self.timeout_s, self.rank)
            step.fail(CallFailure.here(step.index, _LATE, self.rank, text))
        return step.await_verdict(None)  # there is one now

    def _conclude(self, step: Round, failure: CallFailure) -> bytes:
        """Says to those who wait for the result of a step that it has failed."""
        answer = json.dumps(_answer(failure)).encode()
        step.conclude(answer)
        return answer

    def _leave(self, error: BaseException) -> None:
        """This rank leaves by an exception; all ranks count the step in which they learn of it."""
        if self.world_size == 1:
            return
        if self._step is not None:
            self._steps = self._step.index + 1  # the interrupt may have come before it was counted
        # A store that is out of reach is out of reach for the others too.
        with contextlib.suppress(StoreError):
            while not self._fail_step(self._step or self._begin(), error):
                pass  # until a step that no other rank has failed before

    def _fail_step(self, step: Round, error: BaseException) -> bool:
        """Fails the step that this rank is in; returns whether the other ranks leave there. If all
        ranks have finished their parts, they do not, unless they wait for the result of this one;
        nor if what another rank attempted has failed before: they go on with the next step. They
        may wait for the verdict or for the result, so it is recorded for both.
        """
        if isinstance(error, OutlastError):
            failure = CallFailure.here(step.index, _LEFT, self.rank, str(error))
        else:
            failure = CallFailure.of(error, step.index, _LEFT, self.rank)
        step.fail(failure)
        told = step.await_verdict(None).failure  # there is one now
        # An interrupt may have come after the result was sent.
        if told is None and self._concludes and step.conclusion() is None:
            told = failure
        if told is None:
            # Its keys stay: the coordinator may not have read this rank's part yet.
            self._step = None
            return False
        self._conclude(step, told)
        self._end()
        return "error" in _answer(told)


def _answer(failure: CallFailure) -> dict[str, Any]:
    """The result of a step that has failed."""
    if failure.name not in (_LEFT, _LATE):
        return {"failure": dataclasses.asdict(failure)}
    text = failure.cause if failure.name == _LATE else failure.text
    return {"error": text, "rank": failure.rank, "kind": failure.name}
