"""The files that make a checkpoint out of what the ranks have written: metadata and manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence

from outlast.async_checkpoint.save.save import Save
from outlast.async_checkpoint.storage.manifest import (
    CHUNK_BYTES,
    MANIFEST,
    FileEntry,
    Manifest,
    checksum,
    encode,
    pieces,
)
from outlast.async_checkpoint.writer.messages import Commit
from outlast.errors import CheckpointError

_METADATA = ".metadata"


def commit_of(save: Save, parts: Sequence[bytes]) -> tuple[Manifest, Commit]:
    """The manifest of a save, and the request that commits it.

    Args:
        save: on rank 0.
        parts: what each rank has said of its files.

    Raises:
        CheckpointError: if a rank has written to another folder.
    """
    catalog, save_id = save.catalog, save.snapshot.save_id
    assert catalog is not None
    files: dict[str, FileEntry] = {}
    places = {}
    for rank, part in enumerate(map(json.loads, parts)):
        if part["id"] != save_id:
            raise CheckpointError(f"rank {rank} wrote into another folder: {part['id']}")
        places[rank] = part["places"]
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
    )
    content = encode(manifest)
    return manifest, Commit(
        working=save.snapshot.description["working"],
        final=save.snapshot.description["final"],
        files=[(_METADATA, len(metadata)), (MANIFEST, len(content))],  # the manifest is the last
        blob=metadata + content,
    )
