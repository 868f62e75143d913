"""Which checkpoints of states lie in a folder: found, verified, read, removed.

A checkpoint is a folder `states-00000001`, `states-00000002`, ... with a manifest and one file for
each state. All else in the folder belongs to others: it is not looked at, and never removed. What
has the name of a checkpoint and no manifest of this library is not ours either.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Sequence

from outlast.async_checkpoint.storage.local import WORKING, LocalStorage
from outlast.async_checkpoint.storage.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    checksum,
    decode,
    pieces,
)
from outlast.errors import CheckpointError

__all__ = [
    "Chosen",
    "FoundStates",
    "choose",
    "choose_one",
    "folder_of",
    "leftovers",
    "newest",
    "numbered",
    "open_one",
    "read",
    "replaced",
    "survey",
    "working_of",
]

log = logging.getLogger("outlast.elastic")

_FOLDER = re.compile(r"states-(\d{8,18})")
_LEFT = re.compile(re.escape(WORKING) + r"(?:removed-)?states-\d{8,18}-[0-9a-f]+(?:-old)?")


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A checkpoint that was found whole.

    Attributes:
        storage, folder: where it is.
        manifest: what it consists of.
    """

    storage: LocalStorage
    folder: str
    manifest: Manifest

    @property
    def where(self) -> str:
        """Its path."""
        return f"{self.storage.where}/{self.folder}"


@dataclasses.dataclass(frozen=True)
class FoundStates:
    """A folder that is there, and what it is.

    Attributes:
        folder: its name.
        number: of the checkpoint; `None` for what a save that was never committed has left.
        manifest: what it consists of, unless that is damaged.
        wrong: what is wrong, so far as it can be told without reading the files.
    """

    folder: str
    number: int | None
    manifest: Manifest | None
    wrong: str


def folder_of(number: int) -> str:
    """The folder of checkpoint `number`."""
    return f"states-{number:08d}"


def working_of(number: int, save_id: str) -> str:
    """The folder in which it is made."""
    return f"{WORKING}{folder_of(number)}-{save_id}"


def newest(storage: LocalStorage) -> int:
    """The greatest number that a folder has; 0 if there is none. Whatever lies in it: no other
    checkpoint will have its name.
    """
    return max(map(_number, numbered(storage)), default=0)


def numbered(storage: LocalStorage) -> list[str]:
    """The folders that have the name of a checkpoint, the newest first."""
    found = [
        folder
        for folder in storage.folders()
        if _FOLDER.fullmatch(folder) and not (storage.root / folder).is_symlink()
    ]
    return sorted(found, key=_number, reverse=True)


def choose(storage: LocalStorage) -> Chosen | None:
    """The newest checkpoint that is whole, every byte of it; `None` if there was never one.

    Raises:
        CheckpointError: if none is whole, naming what is wrong with each; or if there is one of a
            later format: what it holds must not be passed over.
    """
    wrong = []
    for folder in numbered(storage):
        try:
            chosen = choose_one(storage, folder)
        except CheckpointError as e:
            if _is_later(storage, folder):
                raise
            wrong.append(str(e))
            log.warning("passed over a checkpoint: %s", e)
            continue
        if chosen is not None:
            return chosen
    if wrong:
        raise CheckpointError(
            f"no checkpoint in {storage.where} is valid:\n  " + "\n  ".join(wrong)
        )
    return None


def choose_one(storage: LocalStorage, folder: str) -> Chosen | None:
    """That checkpoint, if it is one; every byte of it was read.

    Raises:
        CheckpointError: if it is damaged, or of a later format.
    """
    try:
        chosen = open_one(storage, folder)
    except FileNotFoundError:
        log.warning("%s/%s is no checkpoint of states: no manifest", storage.where, folder)
        return None
    for name in chosen.manifest.files:
        _verify(chosen, name)
    return chosen


def open_one(storage: LocalStorage, folder: str) -> Chosen:
    """One checkpoint, of which the manifest alone was read.

    Raises:
        FileNotFoundError: if it has none.
        CheckpointError: if that is damaged, or of a later format.
    """
    where = f"{storage.where}/{folder}/{MANIFEST}"
    try:
        content = storage.get(folder, MANIFEST)
    except FileNotFoundError:
        raise
    except OSError as e:
        raise CheckpointError(f"{where} cannot be read: {e}") from e
    manifest = decode(content, where)
    if _number(folder) not in (0, manifest.step):
        raise CheckpointError(f"{where} is the manifest of another checkpoint")
    return Chosen(storage, folder, manifest)


def survey(storage: LocalStorage) -> list[FoundStates]:
    """Everything that is there, the oldest first, what was never committed last. Of the files only
    the sizes are looked at.
    """
    found = []
    for folder in reversed(numbered(storage)):
        try:
            chosen = open_one(storage, folder)
        except FileNotFoundError:
            continue  # somebody else's
        except CheckpointError as e:
            wrong = str(e).removeprefix(f"{storage.where}/{folder}/")
            found.append(FoundStates(folder, _number(folder), None, wrong))
            continue
        wrongs = [_size_wrong(chosen, name) for name in chosen.manifest.files]
        wrong = "; ".join(text for text in wrongs if text)
        found.append(FoundStates(folder, _number(folder), chosen.manifest, wrong))
    return found + [FoundStates(left, None, None, "not committed") for left in leftovers(storage)]


def _size_wrong(chosen: Chosen, name: str) -> str:
    try:
        _sized(chosen, name)
    except CheckpointError as e:
        return str(e).removeprefix(f"{chosen.where}/")
    except OSError as e:
        return f"{name}: {e.strerror or e}"
    return ""


def _verify(chosen: Chosen, name: str) -> None:
    """Reads a file, and keeps nothing of it.

    Raises:
        CheckpointError: naming the file, if it is missing or not what was written.
    """
    manifest = chosen.manifest
    where = f"{chosen.where}/{name}"
    buffer = memoryview(bytearray(min(manifest.chunk_bytes, manifest.files[name].size_bytes)))
    try:
        _sized(chosen, name)
        reader = chosen.storage.open(chosen.folder, name)
        try:
            for number, (at, size) in enumerate(_stretches(chosen, name)):
                reader.read_into(at, buffer[:size])
                _check(chosen, name, number, at, buffer[:size])
        finally:
            reader.close()
    except OSError as e:
        raise CheckpointError(f"{where} cannot be read: {e.strerror or e}") from e


def read(chosen: Chosen, name: str) -> bytes:
    """The content of a file, every byte of it verified.

    Raises:
        CheckpointError: naming the file, if it is missing or not what was written.
    """
    try:
        _sized(chosen, name)
        content = chosen.storage.get(chosen.folder, name)
    except OSError as e:
        raise CheckpointError(f"{chosen.where}/{name} cannot be read: {e.strerror or e}") from e
    view = memoryview(content)
    for number, (at, size) in enumerate(_stretches(chosen, name)):
        _check(chosen, name, number, at, view[at : at + size])
    return content


def _sized(chosen: Chosen, name: str) -> None:
    size, written = chosen.storage.size(chosen.folder, name), chosen.manifest.files[name].size_bytes
    if size != written:
        raise CheckpointError(f"{chosen.where}/{name} has {size} bytes, {written} were written")


def _stretches(chosen: Chosen, name: str) -> Sequence[tuple[int, int]]:
    return pieces(chosen.manifest.files[name].size_bytes, chosen.manifest.chunk_bytes)


def _check(chosen: Chosen, name: str, number: int, at: int, stretch: memoryview) -> None:
    expected = chosen.manifest.files[name].checksums[number : number + 1]
    if [checksum(stretch)] != expected:
        end = at + len(stretch)
        raise CheckpointError(f"{chosen.where}/{name} is damaged between bytes {at} and {end}")


def replaced(storage: LocalStorage, number: int) -> list[str]:
    """The checkpoints that checkpoint `number`, which is committed, takes the place of. What has no
    manifest that this library can read stays.
    """
    older = [folder for folder in numbered(storage) if _number(folder) < number]
    return [folder for folder in older if _format(storage, folder) in range(1, FORMAT_VERSION + 1)]


def leftovers(storage: LocalStorage) -> list[str]:
    """What killed saves and killed removals have left. Only for who has the lock."""
    return [folder for folder in storage.folders() if _LEFT.fullmatch(folder)]


def _number(folder: str) -> int:
    match = _FOLDER.fullmatch(folder)
    return int(match[1]) if match else 0


def _is_later(storage: LocalStorage, folder: str) -> bool:
    return _format(storage, folder) > FORMAT_VERSION


def _format(storage: LocalStorage, folder: str) -> int:
    """The version of the format that a manifest names; 0 if there is none that can be told."""
    try:
        head = json.loads(storage.get(folder, MANIFEST).partition(b"\n")[0])
        version = head["version"] if head["format"] == FORMAT else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return version if isinstance(version, int) else 0
