"""Writes checkpoints without a checkpointer, on any storage."""

from __future__ import annotations

from collections.abc import Mapping

from outlast.async_checkpoint.storage.entries import FileEntry, TensorEntry
from outlast.async_checkpoint.storage.manifest import (
    MANIFEST,
    Manifest,
    checksum,
    encode,
    pieces,
)
from outlast.async_checkpoint.storage.protocol import Storage

CHUNK_BYTES = 1000


def save(
    storage: Storage,
    step: int,
    files: Mapping[str, bytes] | None = None,
    *,
    save_id: str = "aa",
    metric: float | None = None,
    tensors: Mapping[str, TensorEntry] | None = None,
) -> str:
    """Commits a checkpoint; returns its folder."""
    files = files if files is not None else {"__0_0.distcp": bytes(range(256)) * 10}
    working, final = storage.names_for(step, save_id)
    storage.prepare()
    storage.make(working)
    entries = {}
    for name, content in files.items():
        storage.put(working, name, content)
        sums = [checksum(content[at : at + n]) for at, n in pieces(len(content), CHUNK_BYTES)]
        entries[name] = FileEntry(name, len(content), sums)
    described = dict(tensors or {"weight": TensorEntry(["weight"], "float32", [0], [])})
    manifest = Manifest(
        files=entries,
        tensors=described,
        values={},
        step=step,
        save_id=save_id,
        world_size=2,
        metric=metric,
        chunk_bytes=CHUNK_BYTES,
    )
    storage.put(working, MANIFEST, encode(manifest))
    storage.publish(working, final)
    return final
