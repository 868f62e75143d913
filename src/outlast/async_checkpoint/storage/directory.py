"""The checkpoints in a directory: lists, verifies and deletes them. Does not import torch, for the
command line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from outlast.async_checkpoint.storage.entries import FileEntry
from outlast.async_checkpoint.storage.fence import stale
from outlast.async_checkpoint.storage.manifest import (
    HEAD_BYTES,
    LARGEST_BYTES,
    MANIFEST,
    Manifest,
    decode,
    decode_head,
    pieces,
    read_hashed,
)
from outlast.async_checkpoint.storage.protocol import (
    REMOVED,
    STATES,
    STEP,
    Storage,
    is_temporary,
    step_of,
)
from outlast.async_checkpoint.storage.read_errors import Reopened, reading
from outlast.async_checkpoint.storage.recycled_files import RECYCLED
from outlast.errors import CheckpointError, CheckpointReadError


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint.

    Attributes:
        step: the training step.
        folder: the name of its directory.
        size_bytes: of all its files.
        world_size: of the job that saved it.
        metric: the argument of `save(metric=...)`.
        tensors: the number of tensors.
        finite: whether all values of the parameters are finite; `None` if that is not known.
    """

    step: int
    folder: str
    size_bytes: int
    world_size: int
    metric: float | None
    tensors: int
    finite: bool | None = None


@dataclasses.dataclass(frozen=True)
class Found:
    """A directory in the storage, and what it is: `step` of the committed checkpoint, if it is one,
    its `manifest`, unless that is damaged, and what is `wrong`, as far as can be seen without
    reading the files. `saved_at` is when it was committed: see `Storage.saved_at`. `unread`: it
    cannot be read now, which is what is `wrong`, and may be intact.
    """

    folder: str
    step: int | None
    manifest: Manifest | None
    wrong: str
    saved_at: float | None = None
    unread: bool = False


def candidates(storage: Storage) -> list[tuple[int, str]]:
    """Step and directory of all possible checkpoints, the newest step first."""
    found = []
    wrong = reading(storage.where, lambda: stale(storage))
    for folder in reversed(reading(storage.where, storage.folders)):
        if folder in wrong:
            continue
        step = step_of(folder, storage.prefix)
        # Where saves are written in place, a directory without a manifest is a save in progress.
        # Beside checkpoints of states, it belongs to another program.
        unneeded = storage.prefix == STEP and not _in_place(storage)
        # Nor is a link to a checkpoint of states one of this directory.
        linked = storage.prefix == STATES and (Path(storage.where) / folder).is_symlink()
        if step is not None and not linked and (unneeded or is_committed(storage, folder)):
            found.append((step, folder))
    return sorted(found, key=lambda one: one[0], reverse=True)


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Reads the manifest of a checkpoint.

    Raises:
        CheckpointReadError: if it cannot be read now.
        CheckpointMismatch: if it is of a later format.
        CheckpointError: if it is missing, damaged or of another step.
    """
    where = f"{storage.where}/{folder}/{MANIFEST}"
    content = reading(where, lambda: _content(storage, folder, where))
    if content is None:
        raise CheckpointError(f"{where} is missing: the save was not committed")
    manifest = decode(content, where)
    step = step_of(folder, storage.prefix)
    if step is not None and manifest.step != step:
        raise CheckpointError(f"{where} is the manifest of another save, of step {manifest.step}")
    return manifest


def _content(storage: Storage, folder: str, where: str) -> bytes | None:
    """The content of a manifest, of a size that its first line agrees with; `None` without one."""
    try:
        reader = storage.open(folder, MANIFEST)
    except FileNotFoundError:
        return None
    try:
        size = reader.size_bytes
        if size > LARGEST_BYTES:
            raise CheckpointError(f"{where} has {size} bytes: it is no manifest")
        buffer = bytearray(min(size, HEAD_BYTES))
        buffer = buffer[: reader.read_into(0, memoryview(buffer))]
        head = decode_head(bytes(buffer), where)
        if buffer.index(b"\n") + 1 + head.body_bytes != size:
            raise CheckpointError(f"{where} is damaged: it has another size than it was written")
        rest = bytearray(size - len(buffer))
        return bytes(buffer + rest[: reader.read_into(len(buffer), memoryview(rest))])
    finally:
        reader.close()


def list_checkpoints(storage: Storage) -> list[CheckpointInfo]:
    """The committed checkpoints, oldest first; those whose manifest is damaged are left out.

    Raises:
        CheckpointReadError: if a manifest cannot be read now.
    """
    found: dict[int, CheckpointInfo] = {}
    for _, folder in reversed(candidates(storage)):
        try:
            manifest = read_manifest(storage, folder)
        except CheckpointReadError:
            raise
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
        finite=None if manifest.non_finite is None else not manifest.non_finite,
    )


def leftovers(storage: Storage) -> list[str]:
    """Directories that no load reads: of saves that were not committed, and of checkpoints that a
    later one of the same step has replaced. Call with the lock held.
    """
    wanted = dict(reversed(candidates(storage)))
    wrong = stale(storage)
    return [
        folder
        for folder in storage.folders()
        if folder in wrong
        or is_temporary(folder, storage.prefix)
        or (
            (step := step_of(folder, storage.prefix)) is not None
            and _in_place(storage)
            and wanted.get(step) != folder
        )
    ]


def survey(storage: Storage) -> list[Found]:
    """All directories in the storage, by step, the uncommitted ones last. Checks only the sizes of
    the files.
    """
    # Of several checkpoints of a step the newest counts.
    wanted = dict(reversed(candidates(storage)))
    found = [_look(storage, step, folder) for step, folder in sorted(wanted.items())]
    left_behind = stale(storage)
    for folder in storage.folders():
        wrong = left_behind.get(folder, "")
        if is_temporary(folder, storage.prefix):
            recycled = "recycled files, which the next save writes over"
            wrong = recycled if folder == RECYCLED else "not committed"
            if folder.startswith(REMOVED):
                wrong = "removed, but its files are not deleted yet"
        elif step_of(folder, storage.prefix) is not None and folder not in wanted.values():
            if wrong:
                pass
            elif is_committed(storage, folder):
                wrong = "replaced"
            elif storage.prefix == STEP:
                wrong = "not committed"
        if wrong:
            found.append(Found(folder, None, None, wrong))
    return [dataclasses.replace(one, saved_at=storage.saved_at(one.folder)) for one in found]


def _look(storage: Storage, step: int, folder: str) -> Found:
    inside = f"{storage.where}/{folder}/"
    manifest, wrong = None, ""
    try:
        manifest = read_manifest(storage, folder)
        with ThreadPoolExecutor(8, "outlast-look") as pool:
            files = manifest.files.values()
            looks = list(pool.map(lambda file: size_error(storage, folder, file), files))
        wrong = "; ".join(text for text in looks if text)
    except CheckpointError as e:
        unread = isinstance(e, CheckpointReadError)
        return Found(folder, step, manifest, str(e).removeprefix(inside), unread=unread)
    return Found(folder, step, manifest, wrong)


def size_error(storage: Storage, folder: str, file: FileEntry) -> str:
    """What is wrong with the size of a file; empty if nothing is. The file is not read.

    Raises:
        CheckpointReadError: if its size cannot be read now.
    """
    where = f"{storage.where}/{folder}/{file.name}"
    try:
        size = reading(where, lambda: storage.size(folder, file.name))
    except CheckpointReadError:
        raise
    except CheckpointError as e:
        return str(e).removeprefix(f"{storage.where}/{folder}/")
    if size != file.size_bytes:
        return f"{file.name}: {size} bytes instead of {file.size_bytes}"
    return ""


def verify(
    storage: Storage, step: int, progress: Callable[[int], None] = lambda size_bytes: None
) -> CheckpointInfo:
    """Reads and verifies a whole checkpoint; calls `progress` with the size of each verified chunk.

    Raises:
        CheckpointError: names each file that is missing, truncated or damaged.
        CheckpointReadError: if a file cannot be read now.
    """
    folder = _newest(storage, step)
    return info_of(verify_folder(storage, folder, progress), folder)


def verify_folder(
    storage: Storage, folder: str, progress: Callable[[int], None] = lambda size_bytes: None
) -> Manifest:
    """Like `verify`, for a directory of any name; returns its manifest."""
    manifest = read_manifest(storage, folder)
    buffer = memoryview(bytearray(manifest.chunk_bytes))
    checks = (
        size_error(storage, folder, file)
        or _bytes_wrong(storage, folder, file, manifest.chunk_bytes, buffer, progress)
        for file in manifest.files.values()
    )
    wrong = [text for text in checks if text]
    if wrong:
        raise CheckpointError(f"{storage.where}/{folder} is damaged: " + "; ".join(wrong))
    return manifest


def _bytes_wrong(
    storage: Storage,
    folder: str,
    file: FileEntry,
    chunk_bytes: int,
    buffer: memoryview,
    progress: Callable[[int], None],
) -> str:
    where = f"{storage.where}/{folder}/{file.name}"

    try:
        with Reopened(where, lambda: storage.open(folder, file.name)) as reader:
            for (at, size), expected in zip(
                pieces(file.size_bytes, chunk_bytes), file.checksums, strict=True
            ):
                read = partial(read_hashed, offset=at, buffer=buffer[:size])
                if reader.read(read) != (size, expected):
                    return f"{file.name}: damaged between bytes {at} and {at + size}"
                progress(size)
    except CheckpointReadError:
        raise
    except CheckpointError as e:
        return str(e).removeprefix(f"{storage.where}/{folder}/")
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
            f"{storage.where} has no checkpoint of {storage.prefix} {step}; it has {sorted(known)}"
        )
    return known[step]


def _in_place(storage: Storage) -> bool:
    """Whether saves are written to their final directory."""
    working, final = storage.names_for(0, "0")
    return working == final


def is_committed(storage: Storage, folder: str) -> bool:
    """Whether a directory has a manifest, which is written last.

    Raises:
        CheckpointReadError: if that cannot be read now.
    """
    try:
        reading(f"{storage.where}/{folder}/{MANIFEST}", lambda: storage.size(folder, MANIFEST))
    except CheckpointReadError:
        raise
    except CheckpointError:
        return False
    return True
