"""The round of one save: what the ranks tell each other, through the ledger, and their errors.

    announce      each rank names the save: ranks that save different steps fail it
    done          each rank reports its files, along a tree of ranks; or it claims a failure
    verdict       all ranks are done, or one has failed: the ledger tells every rank the same
    conclusion    rank 0 has committed the checkpoint, or says why not

That is all, as long as no rank has a new structure: each rank saves the same share as before.

A rank whose state dict has a new structure must know its share before it copies anything. So it
claims the verdict `_CHANGED`, which it can, because it is not done. In every other rank a thread
waits for the verdict while the files are written, and joins the *agreement* at once, a second call
of the ledger: ranks with a new structure send its parts, the others nothing; rank 0 divides them,
and the shares of the others stay. Then the save is reported a second time, in a third call. No rank
waits in the agreement for a write, or for a seal, which may need the next step of training: all
ranks may be waiting there for the rank with the new structure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outlast.async_checkpoint.writer.client import ProcessFailed
from outlast.async_checkpoint.writer.write_files import Dropped
from outlast.coordination.call_ledger import CallFailure, CallLedger
from outlast.coordination.stores.store import KeyTimeout
from outlast.errors import (
    AsyncCallError,
    CheckpointError,
    CheckpointTimeout,
    OutlastError,
    SaveCancelled,
    StoreError,
)
from outlast.system.error_text import describe
from outlast.system.tracebacks import drop_tracebacks
from outlast.system.waiting import ThreadedWait

ABORTED = "aborted: it was dropped for all ranks"
"""The cause of the failure of a save that a rank dropped (`Saves.abort`)."""
_CHANGED = "the structure of the state has changed"

Divide = Callable[[Sequence[bytes]], dict[str, Any]]
"""Divides the parts that ranks have sent; the answer for them. A `CheckpointError` if that cannot
be done.
"""


def is_due_to_restart(error: Exception) -> bool:
    """Whether a save has ended without a fault of its own: it was dropped, or the store was lost.
    Such an error is raised if the caller continues, but not logged.
    """
    return isinstance(error, SaveCancelled) or isinstance(error.__cause__, StoreError)


class SaveRound:
    """One rank's part in the round of save `index`, which has three calls of the ledger to use.
    `divide` is called on rank 0.
    """

    def __init__(
        self, ledger: CallLedger, index: int, name: str, divide: Divide, timeout_s: float
    ) -> None:
        self.name = name
        self._index = index
        self._rank = ledger.rank
        self._ledger = ledger
        self._divide = divide
        self._timeout_s = timeout_s
        self._first, self._agreement, self._second = range(3 * index, 3 * index + 3)
        self._call = self._first  # in which this rank reports
        self._changed = False  # whether the first call has ended because of a new structure
        self._listening: ThreadedWait[CallFailure | None] | None = None

    # ------------------------------------------------------------ a structure that is new here

    def agree(self, parts: bytes) -> dict[str, Any]:
        """Makes all ranks agree, on the training thread: sends this rank's new parts, and returns
        the shares.
        """
        with contextlib.suppress(AsyncCallError):  # it has failed the save
            self._ledger.announce(self._first, self.name)
        self._ledger.fail(self._first, CallFailure.here(self._index, _CHANGED, self._rank, ""))
        answer: dict[str, Any] | CallFailure | None = self._note(self._verdict(self._first))
        if self._changed:
            answer = self._exchange(parts)
        assert answer is not None  # this rank has not reported: not all are done
        if isinstance(answer, CallFailure):
            raise self.error(answer)
        return answer

    def _exchange(self, parts: bytes) -> dict[str, Any] | CallFailure:
        ledger = self._ledger
        try:
            ledger.finish(self._agreement, parts)
            if ledger.rank == 0:
                failure = ledger.await_verdict(self._agreement, self._timeout_s).failure
                self._conclude_agreement(failure or self._divide(ledger.parts(self._agreement)))
            answer = json.loads(ledger.await_conclusion(self._agreement, self._timeout_s))
        except KeyTimeout as e:
            raise CheckpointTimeout(
                f"rank {ledger.rank} waited for the other ranks to agree who saves what, because a "
                f"state dict has a new structure; not all came within {self._timeout_s:g} s"
            ) from e
        if "failure" in answer:
            self._call = self._agreement  # nothing more is reported
            return CallFailure(**answer["failure"])
        self._call = self._second
        return dict(answer)

    def _conclude_agreement(self, answer: dict[str, Any] | CallFailure) -> None:
        if isinstance(answer, CallFailure):
            answer = {"failure": dataclasses.asdict(answer)}
        text = json.dumps(answer, separators=(",", ":"))
        self._ledger.conclude(self._agreement, text.encode())

    # ------------------------------------------------------------- on the thread of the saves

    def begin(self) -> None:
        """Announces the save, and begins to wait for the verdict. Fails the save if another rank
        has announced another one.
        """
        if self._call == self._first:
            if self._ledger.world_size > 1:
                self._listening = ThreadedWait(self._listen, "outlast-verdict")
            self._ledger.announce(self._first, self.name)

    def _listen(self) -> CallFailure | None:
        failure = self._note(self._verdict(self._first))
        if not self._changed:
            return failure
        try:
            answer = self._exchange(b"")
        except StoreError:
            raise
        except Exception as e:  # noqa: BLE001 - all ranks must know of any error
            answer = self.failure(e)
            self._leave(answer)
        return answer if isinstance(answer, CallFailure) else None

    def report(self, outcome: str | CallFailure) -> CallFailure | None:
        """Reports this rank's record, or its failure, and waits for the verdict: `None`, or the
        failure that is the same on all ranks.
        """
        listening = self._listening
        if listening is not None:
            self._report(self._first, outcome)
            if not listening.over.wait(self._timeout_s):
                self.fail(self._late())
            failure = listening.result()
            if failure is not None or self._call == self._first:
                return failure
        self._report(self._call, outcome)
        try:
            return self._ledger.await_verdict(self._call, self._timeout_s).failure
        except KeyTimeout:
            self._ledger.fail(self._call, self._late())
            return self._verdict(self._call)  # there is one now

    def _report(self, call: int, outcome: str | CallFailure) -> None:
        if isinstance(outcome, CallFailure):
            self._ledger.fail(call, outcome)
        else:
            self._ledger.finish(call, outcome.encode())

    def _late(self) -> CallFailure:
        return self.failure(f"not all ranks had written their parts within {self._timeout_s:g} s")

    def records(self) -> list[bytes]:
        return self._ledger.parts(self._call)

    def conclude(self, result: dict[str, Any]) -> None:
        self._ledger.conclude(self._call, json.dumps(result).encode())

    def await_conclusion(self) -> dict[str, Any]:
        """The result that rank 0 tells; `unknown`: why it has told none."""
        try:
            return dict(json.loads(self._ledger.await_conclusion(self._call, self._timeout_s)))
        except KeyTimeout:
            return {"unknown": f"rank 0 did not report it within {self._timeout_s:g} s"}

    def forget(self) -> None:
        """After the end of the save on this rank."""
        for call in range(self._first, (self._second if self._changed else self._first) + 1):
            self._ledger.forget(call)

    # ------------------------------------------------------------------- failures, on any thread

    def failure(self, cause: str | BaseException) -> CallFailure:
        """The failure of this rank by this error."""
        if isinstance(cause, Dropped | SaveCancelled):
            cause = ABORTED
        traceback = cause.remote_traceback if isinstance(cause, ProcessFailed) else ""
        if isinstance(cause, OutlastError):
            cause = str(cause) or describe(cause)
        if isinstance(cause, str):
            return CallFailure.here(self._index, self.name, self._rank, cause, traceback)
        return CallFailure.of(cause, self._index, self.name, self._rank)

    def error(self, failure: CallFailure, late: bool = False) -> CheckpointError:
        """The error that every rank raises when one has failed or dropped the save; `late` if a
        wait of this rank took too long.
        """
        where = f"rank {failure.rank} on {failure.host}"
        if failure.cause == ABORTED:
            return SaveCancelled(f"the {failure.name} was dropped for all ranks by {where}")
        text = f"the {failure.name} failed on {where}: {failure.cause}"
        kind = CheckpointTimeout if late else CheckpointError
        error = kind(f"{text}\n{failure.traceback.rstrip()}" if failure.traceback else text)
        error.of_another_rank = failure.rank != self._rank
        return error

    def error_of_commit(self, result: Mapping[str, Any]) -> CheckpointError:
        """The error that every rank raises when rank 0 has told this result of the commit."""
        if "dropped" in result:
            return SaveCancelled(f"the {self.name} was {result['dropped']}")
        if "unknown" in result:
            text = f"it is not known whether the {self.name} was committed: {result['unknown']}"
            return CheckpointError(text)
        error = CheckpointError(f"the {self.name} was not committed: {result['error']}")
        error.of_another_rank = self._rank != 0
        return error

    def own_error(self, cause: Exception) -> CheckpointError:
        """The error of a save that this rank could not carry out. Only rank 0 commits: it knows
        that it did not, and the other ranks cannot know without the store.

        Its text says where it comes from. The frames of its traceback hold the save, whose handle
        holds the error: until Python collected that cycle, it would keep the memory of the
        iteration and its connections to the store. So only a bug, whose text may not be enough,
        keeps its traceback.
        """
        if isinstance(cause, OutlastError):
            drop_tracebacks(cause)
        if isinstance(cause, CheckpointError):
            return cause
        if isinstance(cause, StoreError) and self._rank != 0:
            error = self.error_of_commit({"unknown": describe(cause)})
        else:
            error = CheckpointError(f"the {self.name} failed: {describe(cause)}")
        error.__cause__ = cause
        return error

    def fail(self, failure: CallFailure) -> bool:
        """Claims that the save has failed, in the call that decides by now; returns whether this is
        the verdict.
        """
        call, ledger = self._call, self._ledger
        if ledger.fail(call, failure):
            return True
        # There is none once all ranks have forgotten the call.
        verdict = ledger.verdict(call) if call == self._first else None
        if verdict is not None:
            self._note(verdict.failure)
        if verdict is None or not self._changed:
            return False
        # If the ranks have agreed by now, they wait for the second report.
        return ledger.fail(self._agreement, failure) or ledger.fail(self._second, failure)

    def refuse(self, cause: str | BaseException) -> None:
        """This rank has no snapshot of the save, which fails on all ranks. Called once, instead of
        `report`.
        """
        self._leave(self.failure(cause))
        self.forget()

    def _leave(self, failure: CallFailure) -> None:
        self.fail(failure)
        if self._rank == 0 and self._call == self._first and self._changed:
            self._conclude_agreement(failure)  # the other ranks wait for it

    def _note(self, failure: CallFailure | None) -> CallFailure | None:
        self._changed = failure is not None and failure.name == _CHANGED
        return failure

    def _verdict(self, call: int) -> CallFailure | None:
        return self._ledger.await_verdict(call, None).failure
