"""The checkpoints in a directory: lists, verifies and deletes them. Does not import torch, for the
command line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from outlast.async_checkpoint.storage.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    decode,
    pieces,
    read_hashed,
)
from outlast.async_checkpoint.storage.protocol import Storage, step_of
from outlast.async_checkpoint.storage.recycled_files import RECYCLED
from outlast.errors import CheckpointError

__all__ = [
    "CheckpointInfo",
    "Found",
    "candidates",
    "delete",
    "info_of",
    "leftovers",
    "list_checkpoints",
    "read_manifest",
    "survey",
    "verify",
]


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint.

    Attributes:
        step: of the training.
        folder: the name of its directory.
        size_bytes: of all its files.
        world_size: of the job that saved it.
        metric: the argument of `save(metric=...)`.
        tensors: how many it has.
    """

    step: int
    folder: str
    size_bytes: int
    world_size: int
    metric: float | None
    tensors: int


@dataclasses.dataclass(frozen=True)
class Found:
    """A directory in the storage, and what it is.

    Attributes:
        folder: its name.
        step: of the checkpoint; `None` for a directory that is no committed checkpoint.
        info: of the checkpoint, unless its manifest is damaged.
        wrong: what is wrong, as far as can be seen without reading the files; empty if nothing.
    """

    folder: str
    step: int | None
    info: CheckpointInfo | None
    wrong: str


def candidates(storage: Storage) -> list[tuple[int, str]]:
    """Step and directory of all possible checkpoints, the newest step first."""
    found = []
    for folder in reversed(storage.folders()):
        step = step_of(folder)
        # Where saves are written in place, a directory without a manifest is a save in progress.
        if step is not None and (not _in_place(storage) or _committed(storage, folder)):
            found.append((step, folder))
    return sorted(found, key=lambda one: one[0], reverse=True)


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Reads the manifest of a checkpoint.

    Raises:
        CheckpointError: if it is missing, damaged, of a later format or of another step.
    """
    where = f"{storage.where}/{folder}/{MANIFEST}"
    try:
        content = storage.get(folder, MANIFEST)
    except FileNotFoundError:
        raise CheckpointError(f"{where} is missing: the save was not committed") from None
    except OSError as e:
        raise CheckpointError(f"{where} cannot be read: {e}") from e
    manifest = decode(content, where)
    if manifest.step != step_of(folder):
        raise CheckpointError(f"{where} is the manifest of another save, of step {manifest.step}")
    return manifest


def list_checkpoints(storage: Storage) -> list[CheckpointInfo]:
    """The committed checkpoints, oldest first; those whose manifest is damaged are left out."""
    found: dict[int, CheckpointInfo] = {}
    for _, folder in reversed(candidates(storage)):
        try:
            manifest = read_manifest(storage, folder)
        except CheckpointError:
            continue
        found[manifest.step] = info_of(manifest, folder)
    return list(found.values())


def info_of(manifest: Manifest, folder: str) -> CheckpointInfo:
    """Summarizes a manifest."""
    return CheckpointInfo(
        step=manifest.step,
        folder=folder,
        size_bytes=manifest.size_bytes,
        world_size=manifest.world_size,
        metric=manifest.metric,
        tensors=len(manifest.tensors),
    )


def leftovers(storage: Storage) -> list[str]:
    """Directories that no load reads: of saves that were not committed, and of checkpoints that a
    later one of the same step has replaced. Call with the lock held.
    """
    wanted = dict(reversed(candidates(storage)))
    return [
        folder
        for folder in storage.folders()
        if folder.startswith(".tmp-")
        or (
            (step := step_of(folder)) is not None
            and _in_place(storage)
            and wanted.get(step) != folder
        )
    ]


def survey(storage: Storage) -> list[Found]:
    """Everything in the storage, by step, and uncommitted directories last. Checks only the sizes
    of the files.
    """
    # Of several checkpoints of a step the newest counts.
    wanted = dict(reversed(candidates(storage)))
    found = [_look(storage, step, folder) for step, folder in sorted(wanted.items())]
    for folder in storage.folders():
        if folder == RECYCLED:
            found.append(
                Found(folder, None, None, "recycled files, which the next save writes over")
            )
        elif folder.startswith(".tmp-"):
            found.append(Found(folder, None, None, "not committed"))
        elif step_of(folder) is not None and folder not in wanted.values():
            replaced = _committed(storage, folder)
            found.append(Found(folder, None, None, "replaced" if replaced else "not committed"))
    return found


def _look(storage: Storage, step: int, folder: str) -> Found:
    try:
        manifest = read_manifest(storage, folder)
    except CheckpointError as e:
        return Found(folder, step, None, str(e).removeprefix(f"{storage.where}/{folder}/"))
    with ThreadPoolExecutor(8, "outlast-look") as pool:
        looks = pool.map(lambda file: _size_wrong(storage, folder, file), manifest.files.values())
        wrong = "; ".join(text for text in looks if text)
    return Found(folder, step, info_of(manifest, folder), wrong)


def _size_wrong(storage: Storage, folder: str, file: FileEntry) -> str:
    try:
        size = storage.size(folder, file.name)
    except (OSError, CheckpointError) as e:
        return f"{file.name}: {_said(e)}"
    if size != file.size_bytes:
        return f"{file.name}: {size} bytes instead of {file.size_bytes}"
    return ""


def verify(
    storage: Storage, step: int, progress: Callable[[int], None] = lambda size_bytes: None
) -> CheckpointInfo:
    """Reads and verifies a whole checkpoint.

    Args:
        storage: where it is.
        step: of the checkpoint.
        progress: called with the size of each chunk that was verified.

    Raises:
        CheckpointError: names each file that is missing, truncated or damaged.
    """
    folder = _newest(storage, step)
    manifest = read_manifest(storage, folder)
    buffer = memoryview(bytearray(manifest.chunk_bytes))
    checks = (
        _size_wrong(storage, folder, file)
        or _bytes_wrong(storage, folder, file, manifest.chunk_bytes, buffer, progress)
        for file in manifest.files.values()
    )
    wrong = [text for text in checks if text]
    if wrong:
        raise CheckpointError(f"{storage.where}/{folder} is damaged: " + "; ".join(wrong))
    return info_of(manifest, folder)


def _bytes_wrong(
    storage: Storage,
    folder: str,
    file: FileEntry,
    chunk_bytes: int,
    buffer: memoryview,
    progress: Callable[[int], None],
) -> str:
    try:
        reader = storage.open(folder, file.name)
    except (OSError, CheckpointError) as e:
        return f"{file.name}: {_said(e)}"
    try:
        for at, size in pieces(file.size_bytes, chunk_bytes):
            number, piece = at // chunk_bytes, buffer[:size]
            expected = file.checksums[number] if number < len(file.checksums) else ""
            if read_hashed(reader, at, piece) != (size, expected):
                return f"{file.name}: damaged between bytes {at} and {at + size}"
            progress(size)
    except OSError as e:
        return f"{file.name}: {_said(e)}"
    finally:
        reader.close()
    return ""


def delete(storage: Storage, step: int) -> None:
    """Deletes a checkpoint.

    Raises:
        CheckpointError: if it does not exist.
    """
    _newest(storage, step)
    for found, folder in reversed(candidates(storage)):
        if found == step:  # the oldest first: a replaced one must not become visible again
            storage.remove(folder)


def _newest(storage: Storage, step: int) -> str:
    known = dict(reversed(candidates(storage)))
    if step not in known:
        raise CheckpointError(
            f"{storage.where} has no checkpoint of step {step}; it has {sorted(known)}"
        )
    return known[step]


def _in_place(storage: Storage) -> bool:
    """Whether saves are written to their final directory."""
    return storage.names_for(0, "0")[0].startswith("step-")


def _committed(storage: Storage, folder: str) -> bool:
    try:
        storage.size(folder, MANIFEST)
    except FileNotFoundError:
        return False
    return True


def _said(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
