"""How the failure of a save is reported: to the other ranks, and by each rank to its caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outlast.async_checkpoint.writer.client import ProcessFailed
from outlast.async_checkpoint.writer.write_files import Dropped
from outlast.coordination.call_ledger import CallFailure
from outlast.errors import (
    CheckpointError,
    CheckpointTimeout,
    OutlastError,
    SaveCancelled,
    StoreError,
)
from outlast.system.error_text import describe
from outlast.system.tracebacks import drop_tracebacks

ABORTED = "aborted: it was dropped for all ranks"
"""The cause of the failure of a save that a rank dropped (`Saves.abort`)."""


def failure_from(error: BaseException, index: int, name: str, rank: int) -> CallFailure:
    """The failure of this rank by this error."""
    if isinstance(error, Dropped | SaveCancelled):
        return CallFailure.here(index, name, rank, ABORTED)
    if isinstance(error, OutlastError):
        traceback = error.remote_traceback if isinstance(error, ProcessFailed) else ""
        return CallFailure.here(index, name, rank, str(error) or describe(error), traceback)
    return CallFailure.of(error, index, name, rank)


def error_of(failure: CallFailure, rank: int, late: bool = False) -> CheckpointError:
    """The error that every rank raises when one has failed or dropped the save; `rank` is this one,
    and `late` if a wait of it took too long.
    """
    if failure.cause == ABORTED:
        return SaveCancelled(
            f"the {failure.name} was dropped for all ranks by rank {failure.rank} on {failure.host}"
        )
    text = f"the {failure.name} failed on rank {failure.rank} on {failure.host}: {failure.cause}"
    kind = CheckpointTimeout if late else CheckpointError
    error = kind(f"{text}\n{failure.traceback.rstrip()}" if failure.traceback else text)
    error.of_another_rank = failure.rank != rank
    return error


def error_of_commit(name: str, result: Mapping[str, Any], rank: int) -> CheckpointError:
    """The error that every rank raises when rank 0 has told this result of the commit."""
    if "dropped" in result:
        return SaveCancelled(f"the {name} was {result['dropped']}")
    if "unknown" in result:
        text = f"it is not known whether the {name} was committed: {result['unknown']}"
        return CheckpointError(text)
    error = CheckpointError(f"the {name} was not committed: {result['error']}")
    error.of_another_rank = rank != 0
    return error


def own_error(name: str, rank: int, cause: Exception) -> CheckpointError:
    """The error of a save that this rank could not carry out. Only rank 0 commits: it knows that it
    did not, and the other ranks cannot know without the store.

    Its text says where it comes from. The frames of its traceback hold the save, whose handle holds
    the error: until Python collected that cycle, it would keep the memory of the iteration and its
    connections to the store. So only a bug, whose text may not be enough, keeps its traceback.
    """
    if isinstance(cause, OutlastError):
        drop_tracebacks(cause)
    if isinstance(cause, CheckpointError):
        return cause
    if isinstance(cause, StoreError) and rank != 0:
        error = error_of_commit(name, {"unknown": describe(cause)}, rank)
    else:
        error = CheckpointError(f"the {name} failed: {describe(cause)}")
    error.__cause__ = cause
    return error


def is_due_to_restart(error: Exception) -> bool:
    """Whether a save has ended without a fault of its own: it was dropped, or the store was lost.
    Such an error is raised if the caller continues, but not logged.
    """
    return isinstance(error, SaveCancelled) or isinstance(error.__cause__, StoreError)
