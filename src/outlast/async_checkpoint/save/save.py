"""A save in progress, how it is committed, and how its failure is reported."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Sequence

from outlast.async_checkpoint.handle import SaveHandle
from outlast.async_checkpoint.save.catalog import Catalog
from outlast.async_checkpoint.save.take_snapshot import Snapshot
from outlast.async_checkpoint.storage.entries import FileEntry
from outlast.async_checkpoint.storage.fence import Credentials
from outlast.async_checkpoint.storage.manifest import (
    CHUNK_BYTES,
    MANIFEST,
    Manifest,
    checksum,
    encode,
    pieces,
)
from outlast.async_checkpoint.writer.client import WriterFailed
from outlast.async_checkpoint.writer.messages import Commit
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

_METADATA = ".metadata"
ABORTED = "aborted: it was dropped for all ranks"
"""The cause of the failure of a save that a rank dropped (`SavePipeline.abort`)."""


@dataclasses.dataclass
class Save:
    """A save that has not ended.

    Attributes:
        index: of the save in its checkpointer, the same on all ranks.
        agreed: whether the ranks have agreed on the structure already, because it is new.
        catalog: on rank 0, what the checkpoint holds; set once the ranks have agreed.
        began: when `Checkpointer.save` was called.
        blocked_s: how long training waited for the snapshot.
        finite: the names of tensors whose values must be finite.
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
    finite: Collection[str] = ()

    @property
    def name(self) -> str:
        """Its name in messages, which differs between ranks that save different steps."""
        return save_name(self.step)

    def failure(self, cause: str, traceback: str = "") -> CallFailure:
        """The failure of this rank."""
        return CallFailure.here(self.index, self.name, self.rank, cause, traceback)

    def failure_of(self, error: Exception) -> CallFailure:
        """The failure of this rank by this error."""
        if isinstance(error, Dropped | SaveCancelled):
            return self.failure(ABORTED)
        if isinstance(error, OutlastError):
            traceback = error.remote_traceback if isinstance(error, WriterFailed) else ""
            return self.failure(str(error), traceback)
        return CallFailure.of(error, self.index, self.name, self.rank)


def save_name(step: int) -> str:
    """The name of the save of a step in messages."""
    return f"save of step {step}"


def error_from(save: Save, cause: Exception) -> CheckpointError:
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
    text = f"the {save.name} failed: {describe(cause)}"
    if isinstance(cause, StoreError) and save.rank != 0:
        text = f"it is not known whether the {save.name} was committed: {describe(cause)}"
    error = CheckpointError(text)
    error.__cause__ = cause
    return error


def no_buffer(
    step: int, earlier: Sequence[int], rank: int, timeout_s: float, url: str
) -> CheckpointTimeout:
    """The error of a save that cannot begin, because saves of `earlier` steps use all buffers."""
    return CheckpointTimeout(
        f"the {save_name(step)} could not begin: rank {rank} waited {timeout_s:g} s for a free "
        f"snapshot buffer while step {', '.join(map(str, earlier))} was being written to {url} "
        "(the disk may not respond)"
    )


def error_of(failure: CallFailure, late: bool = False) -> CheckpointError:
    """The error that every rank raises when one has failed or dropped the save; `late` if a wait of
    this rank took too long.
    """
    if failure.cause == ABORTED:
        return SaveCancelled(
            f"the {failure.name} was dropped for all ranks by rank {failure.rank} on {failure.host}"
        )
    text = f"the {failure.name} failed on rank {failure.rank} on {failure.host}: {failure.cause}"
    kind = CheckpointTimeout if late else CheckpointError
    return kind(f"{text}\n{failure.traceback.rstrip()}" if failure.traceback else text)


def commit_of(
    save: Save, parts: Sequence[bytes], credentials: Credentials
) -> tuple[Manifest, Commit]:
    """The manifest of a save, and the request that commits it, on rank 0; `parts` are the ranks'
    reports on their files.

    Raises:
        CheckpointError: if a rank has written to a different folder.
    """
    catalog, save_id = save.catalog, save.snapshot.save_id
    assert catalog is not None
    files: dict[str, FileEntry] = {}
    places = {}
    judged: list[list[str]] = []
    for rank, part in enumerate(map(json.loads, parts)):
        if part["id"] != save_id:
            raise CheckpointError(f"rank {rank} wrote into another folder: {part['id']}")
        places[rank] = part["places"]
        if "non_finite" in part:
            judged.append(part["non_finite"])
        for name, entry in part["files"].items():
            files[name] = FileEntry(name, entry["size_bytes"], entry["checksums"])
    values = catalog.values(places)
    metadata = catalog.metadata(values)
    checksums = [checksum(metadata[at : at + n]) for at, n in pieces(len(metadata))]
    files[_METADATA] = FileEntry(_METADATA, len(metadata), checksums)
    manifest = Manifest(
        step=save.step,
        save_id=save_id,
        world_size=len(parts),
        metric=save.metric,
        chunk_bytes=CHUNK_BYTES,
        files=files,
        tensors=catalog.tensors,
        values=values,
        non_finite=sorted(set().union(*judged)) if judged else None,
    )
    content = encode(manifest)
    return manifest, Commit(
        working=save.snapshot.description["working"],
        final=save.snapshot.description["final"],
        files=[(_METADATA, len(metadata)), (MANIFEST, len(content))],  # the manifest is the last
        blob=metadata + content,
        writer=credentials.writer,
        lease=credentials.lease,
    )
