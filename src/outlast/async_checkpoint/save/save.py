"""A save in progress, and how its failure is reported."""

from __future__ import annotations

import dataclasses

from outlast.async_checkpoint.handle import SaveHandle
from outlast.async_checkpoint.save.catalog import Catalog
from outlast.async_checkpoint.save.take_snapshot import Snapshot
from outlast.async_checkpoint.writer.client import WriterFailed
from outlast.async_checkpoint.writer.write_files import Dropped
from outlast.coordination.call_failure import CallFailure
from outlast.errors import CheckpointError, OutlastError

ABORTED = "aborted: it was dropped for all ranks"


@dataclasses.dataclass
class Save:
    """A save that has not ended.

    Attributes:
        index: of the save in its checkpointer, the same on all ranks.
        rank: this one.
        step, metric: as given to `Checkpointer.save`.
        snapshot: what is saved.
        agreed: whether the ranks have agreed on the structure already, because it is new.
        catalog: on rank 0, what the checkpoint holds; set once the ranks have agreed.
        handle: what `Checkpointer.save` returned.
        began: when it was called.
        blocked_s: how long the training waited for the snapshot.
    """

    index: int
    rank: int
    step: int
    metric: float | None
    snapshot: Snapshot
    agreed: bool
    catalog: Catalog | None
    handle: SaveHandle
    began: float
    blocked_s: float

    @property
    def name(self) -> str:
        """Its name in messages, which differs between ranks that save different steps."""
        return save_name(self.step)

    def failure(self, cause: str, traceback: str = "") -> CallFailure:
        """The failure of this rank."""
        return CallFailure.here(self.index, self.name, self.rank, cause, traceback)

    def failure_of(self, error: Exception) -> CallFailure:
        """The failure of this rank by this error."""
        if isinstance(error, Dropped):
            return self.failure(ABORTED)
        if isinstance(error, WriterFailed):
            return self.failure(str(error), error.remote_traceback)
        if isinstance(error, OutlastError):
            return self.failure(str(error))
        return CallFailure.of(error, self.index, self.name, self.rank)


def save_name(step: int) -> str:
    """The name of the save of a step in messages."""
    return f"save of step {step}"


def error_of(failure: CallFailure) -> CheckpointError:
    """The error that every rank raises when one has failed."""
    text = f"the {failure.name} failed on rank {failure.rank} on {failure.host}: {failure.cause}"
    return CheckpointError(f"{text}\n{failure.traceback.rstrip()}" if failure.traceback else text)
