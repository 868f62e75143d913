"""The round of one save: what the ranks tell each other, through the ledger, and their errors.

It is two rounds of the ledger, each with a verdict and a conclusion:

    announcement   each rank names the save, and sends the parts that it has if their structure is
                   new; done once all ranks have named the same save
    shares         if a structure is new: rank 0 has divided the parts
    save           each rank reports its files, or claims a failure; the verdict is the outcome of
                   the save on every rank
    result         rank 0 has committed the checkpoint, or says why not

No rank reports before it has announced. A rank whose save has another name than the first one's is
not counted in the announcement, and reports nothing: it claims a failure. So a save that is done
was announced by every rank under one name, whichever came first.

A rank with a new structure must know its share before it copies anything: it waits for the shares.
Every other rank saves the same share as before, and writes its files at once; on rank 0, a thread
waits for the announcements and divides the parts meanwhile. No rank waits for shares until a file
is written, or a snapshot is sealed, which may need the next step of training: all ranks may be
waiting there for the rank with the new structure.

A failure is claimed in the announcement first, and then in the save, so no rank waits in vain for
either: when the save has a verdict, the announcement has one too.

Threads of a rank share no variables of the round: the simulation (`tests/simulation`) runs each.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outlast.async_checkpoint.snapshot.snapshot import TORN
from outlast.async_checkpoint.writer.client import ProcessFailed
from outlast.async_checkpoint.writer.write_files import Dropped
from outlast.coordination.call_ledger import DIFFERENT_ORDER, CallFailure, CallLedger, Round
from outlast.coordination.stores.store import KeyTimeout
from outlast.errors import (
    AsyncCallError,
    CheckpointError,
    CheckpointTimeout,
    OutlastError,
    SaveCancelled,
    StoreError,
    TornSnapshot,
    UnevenRanks,
)
from outlast.events.hung_ranks import EQUAL_STEPS
from outlast.system.error_text import describe, drop_tracebacks
from outlast.system.parallel import ThreadedWait

ABORTED = "aborted: it was dropped for all ranks"
"""The cause of the failure of a save that a rank dropped (`Saves.abort`)."""
_SAME = b"same"  # what a rank announces whose structure is not new

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
    """One rank's part in the round of save `index`. `divide` is called on rank 0."""

    def __init__(
        self,
        ledger: CallLedger,
        index: int,
        name: str,
        divide: Divide,
        timeout_s: float,
        place: str = "",
    ) -> None:
        self.name = name
        self._announced_as = f"{name} ({place})" if place else name
        self._index = index
        self._rank = ledger.rank
        self._alone, self._divide, self._timeout_s = ledger.world_size == 1, divide, timeout_s
        self._announcement, self._save = ledger.round(index, "begun"), ledger.round(index, "done")
        self._announced = False
        self._listening: ThreadedWait[None] | None = None

    # ------------------------------------------------------------ a structure that is new here

    def agree(self, parts: bytes) -> dict[str, Any]:
        """Agrees with all ranks: sends this rank's new parts, and returns the shares."""
        announcement = self._announcement
        self._announce(parts)
        try:
            if self._rank == 0:
                self._share_out(self._timeout_s)
            if announcement.await_verdict(self._timeout_s).done:
                shares = json.loads(announcement.await_conclusion(self._timeout_s))
                if shares:
                    return dict(shares)
        except KeyTimeout as e:
            raise CheckpointTimeout(
                f"rank {self._rank} waited for the other ranks to agree who saves what, because a "
                f"state dict has a new structure; {self._absent(announcement)} within "
                f"{self._timeout_s:g} s"
            ) from e
        raise self._failed()

    def _announce(self, parts: bytes) -> None:
        self._announced = True
        try:
            self._announcement.announce(self._announced_as)
        except AsyncCallError:
            raise self._failed() from None
        self._announcement.finish(parts)

    def _failed(self) -> CheckpointError:
        """The error of a save that failed before this rank had its share."""
        failure = self._announcement.await_verdict(None).failure
        if failure is not None:
            self._save.fail(failure)
        # There is one now: rank 0 has claimed a failure before it told that there are no shares.
        failure = self._save.await_verdict(None).failure
        assert failure is not None  # this rank has not reported
        return self.error(failure)

    def _share_out(self, timeout_s: float | None) -> None:
        """On rank 0: waits for the announcements, and divides the parts that ranks have sent."""
        if self._announcement.await_verdict(timeout_s).done:
            announced = self._announcement.parts()
            parts = [b"" if part == _SAME else part for part in announced]
            if any(parts):
                self._tell_shares(self._divide(parts))

    def _tell_shares(self, shares: dict[str, Any]) -> None:
        text = json.dumps(shares, separators=(",", ":"))
        self._announcement.conclude(text.encode())

    # ------------------------------------------------------------- on the thread of the saves

    def begin(self) -> None:
        """Announces the save. Fails it if another rank has announced another one."""
        if not self._announced:
            self._announce(_SAME)
            if self._rank == 0 and not self._alone:
                self._listening = ThreadedWait(self._listen, "outlast-shares")

    def _listen(self) -> None:
        try:
            self._share_out(None)
        except StoreError:
            raise
        except Exception as e:  # noqa: BLE001 - all ranks must know of any error
            self._leave(self.failure(e))

    def await_announcements(self) -> None:
        """Before the report of a failure that may come from ranks which are not at the same place:
        waits until all have announced the save. If they differ, that is its failure on all ranks.
        """
        with contextlib.suppress(KeyTimeout):
            failure = self._announcement.await_verdict(self._timeout_s).failure
            if failure is not None:
                self._save.fail(failure)

    def report(self, outcome: str | CallFailure) -> CallFailure | None:
        """Reports this rank's record or failure; returns the failure that all have, or `None`."""
        save = self._save
        if isinstance(outcome, CallFailure):
            self.fail(outcome)
        else:
            save.finish(outcome.encode())
        try:
            failure = save.await_verdict(self._timeout_s).failure
        except KeyTimeout:
            late = f"not all ranks had written their parts within {self._timeout_s:g} s: "
            self.fail(self.failure(late + self._absent(save)))
            failure = save.await_verdict(None).failure  # there is one now
        if self._listening is not None:
            self._listening.result()
        return failure

    def _absent(self, waited: Round) -> str:
        """Says which ranks have not announced the save, or not done their part of `waited`."""
        for each, what in ((self._announcement, "begun this save"), (waited, "written its part")):
            parts = each.parts_so_far()
            absent = [str(rank) for rank, part in enumerate(parts) if not part]
            if absent:
                return f"rank {', '.join(absent)} had not {what}"
        return "rank 0 had not answered"

    def records(self) -> list[bytes]:
        return self._save.parts()

    def conclude(self, result: dict[str, Any]) -> None:
        self._save.conclude(json.dumps(result).encode())

    def await_conclusion(self) -> dict[str, Any]:
        """The result of rank 0."""
        try:
            return dict(json.loads(self._save.await_conclusion(self._timeout_s)))
        except KeyTimeout:
            why = f"rank 0 did not report it within {self._timeout_s:g} s"
            raise self.error_of_commit({"unknown": why}) from None

    def forget(self) -> None:
        """After the end of the save on this rank."""
        self._announcement.forget()
        self._save.forget()

    # ------------------------------------------------------------------- failures, on any thread

    def failure(self, cause: str | BaseException) -> CallFailure:
        if isinstance(cause, Dropped | SaveCancelled):
            cause = ABORTED
        traceback = cause.remote_traceback if isinstance(cause, ProcessFailed) else ""
        if isinstance(cause, OutlastError):
            cause = str(cause) or describe(cause)
        if isinstance(cause, str):
            return CallFailure.here(self._index, self.name, self._rank, cause, traceback)
        return CallFailure.of(cause, self._index, self.name, self._rank)

    def error(self, failure: CallFailure, late: bool = False) -> CheckpointError:
        """The error of a failed or dropped save, on all ranks; `late`: a wait was too long here."""
        where = f"rank {failure.rank} on {failure.host}"
        if failure.cause == ABORTED:
            return SaveCancelled(f"the {failure.name} was dropped for all ranks by {where}")
        text = f"the {failure.name} failed on {where}: {failure.cause}"
        kind = TornSnapshot if TORN in text else CheckpointTimeout if late else CheckpointError
        if DIFFERENT_ORDER in text:
            kind = UnevenRanks
            if EQUAL_STEPS not in text:
                text += f". All ranks must save the same steps; {EQUAL_STEPS}"
        elif failure.name != self.name:
            text += f"; rank {self._rank} was at the {self.name}"
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
        iteration and its connections to the store. Only a bug keeps it: its text may not be enough.
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
        """Claims that the save has failed; returns whether this is the verdict."""
        self._announcement.fail(failure)
        return self._save.fail(failure)

    def refuse(self, cause: str | BaseException) -> None:
        """Instead of `report`, once: this rank has no snapshot of the save, which fails on all."""
        self._leave(self.failure(cause))
        self.forget()

    def _leave(self, failure: CallFailure) -> None:
        self.fail(failure)
        if self._rank == 0:
            self._tell_shares({})  # to the ranks that wait for them
