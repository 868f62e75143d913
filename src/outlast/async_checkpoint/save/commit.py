"""The commit of a checkpoint, on rank 0: the manifest is written, then the folder is renamed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from outlast.async_checkpoint.save.catalog import METADATA
from outlast.async_checkpoint.save.folder_session import FolderSession
from outlast.async_checkpoint.storage.manifest import MANIFEST, Manifest, encode, saved_by
from outlast.async_checkpoint.writer.client import ProcessFailed
from outlast.async_checkpoint.writer.handover import SnapshotDescription
from outlast.async_checkpoint.writer.main import Writer
from outlast.async_checkpoint.writer.write_files import Dropped
from outlast.errors import CheckpointError, CheckpointTimeout, OutlastError
from outlast.system.error_text import describe

_DROPPED = "dropped for all ranks by rank 0, while it was being committed"


def commit_checkpoint(
    session: FolderSession,
    snapshot: SnapshotDescription,
    make_manifest: Callable[[], tuple[Manifest, bytes]],
    is_aborted: Callable[[], bool],
) -> tuple[Manifest | None, dict[str, Any]]:
    """Makes a checkpoint visible. Returns the manifest, if it is committed, and the result for the
    other ranks: the `size_bytes` of the checkpoint, or why it is not committed (`error`,
    `dropped`), or may not be (`unknown`).
    """
    manifest: Manifest | None = None
    try:
        manifest, metadata = make_manifest()
        content = encode(manifest)
        session.writer.request(
            Writer.commit,
            working=snapshot["working"],
            final=snapshot["final"],
            files=[(METADATA, len(metadata)), (MANIFEST, len(content))],  # the manifest is the last
            blob=metadata + content,
            writer=session.credentials.writer,
            lease=session.credentials.lease,
        )
    except Exception as e:  # noqa: BLE001 - the other ranks wait for the result
        why = str(e) if isinstance(e, OutlastError) and str(e) else describe(e)
        try:
            if manifest is not None and _is_committed(session, snapshot, e):
                return manifest, {"size_bytes": manifest.size_bytes}
        except (OutlastError, OSError, Dropped) as unknown:
            if is_aborted() and not _is_visible(session, snapshot):
                return None, {"dropped": _DROPPED}  # its writer has ended, and renames nothing
            # Nothing is removed: what is visible now may be gone after a power failure, and then
            # the checkpoint that it replaced counts again.
            also = "" if unknown is e else f"; and then {describe(unknown)}"
            return None, {"unknown": f"rank 0: {why}{also}"}
        remove_files(session, snapshot)
        if is_aborted():
            return None, {"dropped": _DROPPED}
        return None, {"error": f"rank 0 could not commit it: {why}"}
    return manifest, {"size_bytes": manifest.size_bytes}


def remove_files(session: FolderSession, snapshot: SnapshotDescription) -> None:
    """Removes the files of a save that failed. If that fails too, the next job does it."""
    with contextlib.suppress(ProcessFailed, Dropped):
        session.writer.request(Writer.remove_folders, folders=[snapshot["working"]])


def _is_committed(session: FolderSession, snapshot: SnapshotDescription, error: Exception) -> bool:
    """Whether the save is committed although the commit has failed with `error`: the writer may
    have been killed between the rename and its answer, or the disk may have failed only then. It is
    durable if so.

    Raises:
        CheckpointError: if that cannot be known. A disk that does not respond is not asked.
    """
    if isinstance(error, CheckpointTimeout):
        raise error
    names = {name: snapshot[name] for name in ("working", "final", "save_id")}
    return session.writer.request(Writer.settle_commit, **names)


def _is_visible(session: FolderSession, snapshot: SnapshotDescription) -> bool:
    """Whether a restore may load the save, after its writer has ended."""
    try:
        return saved_by(session.storage, snapshot["final"]) == snapshot["save_id"]
    except (CheckpointError, OSError):
        return True
