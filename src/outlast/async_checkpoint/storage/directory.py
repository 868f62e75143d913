"""The checkpoints in a directory: lists, verifies and deletes them, without importing torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

from outlast.async_checkpoint.storage.entries import FileEntry
from outlast.async_checkpoint.storage.fence import stale
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.async_checkpoint.storage.manifest import (
    HEAD_BYTES,
    LARGEST_BYTES,
    MANIFEST,
    Manifest,
    checksum,
    decode,
    decode_head,
    pieces,
    read_hashed,
    sections_of,
)
from outlast.async_checkpoint.storage.protocol import (
    REMOVED,
    Storage,
    is_temporary,
    read_bytes,
    step_of,
)
from outlast.async_checkpoint.storage.recycled_files import RECYCLED
from outlast.async_checkpoint.storage.remote import RemoteStorage
from outlast.async_checkpoint.storage.system_errors import Reopened, reading
from outlast.errors import CheckpointError, CheckpointReadError


def open_storage(url: str) -> Storage:
    """The storage at a path, at `file://` and a path, or at a URL: see `RemoteStorage`."""
    path = url.removeprefix("file://")
    return RemoteStorage(url) if "://" in path else LocalStorage(path)


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


_known: dict[tuple[str, str, str], CheckpointInfo] = {}
"""By where they are, and the checksums of their manifests: what a manifest says is checked once.
That takes longer than all else that is read of storage at a restart in place.
"""
_MOST_KNOWN = 64


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


def _classified(storage: Storage) -> list[Found]:
    """The directories of checkpoints and saves, of one step the newest last. What is `wrong` says
    why no load reads it: then `step` is `None`.
    """
    left_behind = reading(storage.where, lambda: stale(storage))
    found = []
    for folder in reading(storage.where, storage.folders):
        step, wrong = step_of(folder), left_behind.get(folder, "")
        if folder == RECYCLED:
            wrong = "recycled files, which the next save writes over"
        elif is_temporary(folder):
            removed = folder.startswith(REMOVED)
            wrong = "removed, but its files are not deleted yet" if removed else "not committed"
        elif step is None:
            continue
        elif not wrong and _in_place(storage) and not is_committed(storage, folder):
            wrong = "not committed"  # a save in progress
        found.append(Found(folder, None if wrong else step, None, wrong))
    return found


def candidates(storage: Storage) -> list[tuple[int, str]]:
    """Step and directory of all possible checkpoints: newest step first, newest commit first."""
    found = reversed(_classified(storage))
    steps = [(one.step, one.folder) for one in found if one.step is not None]
    return sorted(steps, key=lambda one: one[0], reverse=True)


def read_manifest(storage: Storage, folder: str, content: bytes | None = None) -> Manifest:
    """Reads the manifest of a checkpoint, or takes the `content` that was read. A
    `CheckpointReadError` if it cannot be read now. A `CheckpointMismatch` if it is of a later
    format. A `CheckpointError` if it is missing, damaged or of another step.
    """
    where = f"{storage.where}/{folder}/{MANIFEST}"
    manifest = decode(_content(storage, folder) if content is None else content, where)
    step = step_of(folder)
    if step is not None and manifest.step != step:
        raise CheckpointError(f"{where} is the manifest of another save, of step {manifest.step}")
    return manifest


def _content(storage: Storage, folder: str) -> bytes:
    where = f"{storage.where}/{folder}/{MANIFEST}"

    def read() -> bytes | None:
        try:
            reader = storage.open(folder, MANIFEST)
        except FileNotFoundError:
            return None
        with closing(reader):
            size = reader.size_bytes
            if size > LARGEST_BYTES:
                raise CheckpointError(f"{where} has {size} bytes: it is no manifest")
            begin = read_bytes(reader, 0, min(size, HEAD_BYTES))
            # The first line says the size: memory is allocated only for what was written.
            if begin.find(b"\n") + 1 + decode_head(begin, where).body_bytes != size:
                raise CheckpointError(f"{where} is damaged: it has another size than was written")
            return begin + read_bytes(reader, len(begin), size - len(begin))

    content = reading(where, read)
    if content is None:
        raise CheckpointError(f"{where} is missing: the save was not committed")
    return content


def list_checkpoints(storage: Storage) -> list[CheckpointInfo]:
    """The committed checkpoints that are intact, oldest first; or a `CheckpointReadError`."""
    found: dict[int, CheckpointInfo] = {}
    for info in _intact(storage):
        found.setdefault(info.step, info)
    return list(reversed(found.values()))


def newest_checkpoint(storage: Storage) -> CheckpointInfo | None:
    """The last one of `list_checkpoints`: no other manifest is read."""
    return next(_intact(storage), None)


def _intact(storage: Storage) -> Iterator[CheckpointInfo]:
    """In the order of `candidates`."""
    for _, folder in candidates(storage):
        try:
            content = _content(storage, folder)
            key = storage.where, folder, checksum(content)
            if (info := _known.get(key)) is None:
                if len(_known) >= _MOST_KNOWN:
                    _known.clear()
                info = _known[key] = _info(read_manifest(storage, folder, content), folder)
            yield info
        except CheckpointReadError:
            raise
        except CheckpointError:
            continue


def _info(manifest: Manifest, folder: str) -> CheckpointInfo:
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
    found = _classified(storage)
    newest = {one.step: one.folder for one in found}
    return [
        one.folder
        for one in found
        if one.step is None or (_in_place(storage) and newest[one.step] != one.folder)
    ]


def survey(storage: Storage) -> list[Found]:
    """All directories, by step, the uncommitted ones last. Checks only the sizes of the files."""
    found = _classified(storage)
    newest = {one.step: one.folder for one in found if one.step is not None}
    looks = [_look(storage, step, folder) for step, folder in sorted(newest.items())]
    for one in found:
        if one.step is None:
            looks.append(one)
        elif newest[one.step] != one.folder:
            wrong = "replaced" if is_committed(storage, one.folder) else "not committed"
            looks.append(Found(one.folder, None, None, wrong))
    return [dataclasses.replace(one, saved_at=storage.saved_at(one.folder)) for one in looks]


def _look(storage: Storage, step: int, folder: str) -> Found:
    manifest = None
    try:
        manifest = read_manifest(storage, folder)
        with ThreadPoolExecutor(8, "outlast-look") as pool:
            files = manifest.files.values()
            looks = list(pool.map(lambda file: size_error(storage, folder, file), files))
    except CheckpointError as e:
        wrong = str(e).removeprefix(f"{storage.where}/{folder}/")
        return Found(folder, step, manifest, wrong, unread=isinstance(e, CheckpointReadError))
    return Found(folder, step, manifest, "; ".join(filter(None, looks)))


def has_all_files(storage: Storage, folder: str) -> bool:
    """Whether a checkpoint has all its files, with their sizes. They are not read. A
    `CheckpointReadError` if that cannot be read now.
    """
    try:
        files = read_manifest(storage, folder).files
        found = reading(f"{storage.where}/{folder}", lambda: storage.sizes(folder))
    except CheckpointReadError:
        raise
    except CheckpointError:
        return False
    return all(found.get(name) == file.size_bytes for name, file in files.items())


def size_error(storage: Storage, folder: str, file: FileEntry) -> str:
    """What is wrong with the size of a file, which is not read; empty if nothing is."""
    where = f"{storage.where}/{folder}/{file.name}"

    def look() -> str:
        size = reading(where, lambda: storage.size(folder, file.name))
        expected = file.size_bytes
        return "" if size == expected else f"{file.name}: {size} bytes instead of {expected}"

    return _damage(storage, folder, look)


def _damage(storage: Storage, folder: str, look: Callable[[], str]) -> str:
    """What `look` returns, or the damage that it raises."""
    try:
        return look()
    except CheckpointReadError:
        raise
    except CheckpointError as e:
        return str(e).removeprefix(f"{storage.where}/{folder}/")


def verify(
    storage: Storage, step: int, progress: Callable[[int], None] = lambda size_bytes: None
) -> CheckpointInfo:
    """Reads and verifies a whole checkpoint; calls `progress` with the size of each verified chunk.
    A `CheckpointError` names each file that is missing, truncated or damaged. A
    `CheckpointReadError` if a file cannot be read now.
    """
    folder = _newest(storage, step)
    return _info(verify_folder(storage, folder, progress), folder)


def verify_folder(
    storage: Storage, folder: str, progress: Callable[[int], None] = lambda size_bytes: None
) -> Manifest:
    """Like `verify`, for a directory of any name; returns its manifest."""
    manifest = read_manifest(storage, folder)
    buffer = memoryview(bytearray(manifest.chunk_bytes))

    def look(file: FileEntry) -> str:
        where = f"{storage.where}/{folder}/{file.name}"
        chunks = pieces(file.size_bytes, manifest.chunk_bytes)
        with Reopened(where, lambda: storage.open(folder, file.name)) as reader:
            for (at, size), expected in zip(chunks, file.checksums, strict=True):
                into = partial(sections_of, buffer[:size])
                read = partial(read_hashed, offset=at, sections=into)
                if reader.read(read) != (size, expected):
                    return f"{file.name}: damaged between bytes {at} and {at + size}"
                progress(size)
        return ""

    checks = [
        size_error(storage, folder, file) or _damage(storage, folder, partial(look, file))
        for file in manifest.files.values()
    ]
    if wrong := [text for text in checks if text]:
        raise CheckpointError(f"{storage.where}/{folder} is damaged: " + "; ".join(wrong))
    return manifest


def delete(storage: Storage, step: int) -> None:
    """Deletes a checkpoint; a `CheckpointError` if it does not exist."""
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
    working, final = storage.names_for(0, "0")
    return working == final


def is_committed(storage: Storage, folder: str) -> bool:
    """Whether a directory has a manifest, which is written last; or a `CheckpointReadError`."""
    try:
        reading(f"{storage.where}/{folder}/{MANIFEST}", lambda: storage.size(folder, MANIFEST))
    except CheckpointReadError:
        raise
    except CheckpointError:
        return False
    return True
