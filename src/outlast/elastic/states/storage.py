"""The checkpoints of states: rank 0's `Checkpointer` alone saves a tensor of bytes for each state,
and chooses the checkpoint that all replicas load.

A load needs no lock: replicas without a process group, and other programs, may read while a job
saves.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from typing import BinaryIO, cast

import torch

from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.inspection import LocalStorage, candidates, verify_folder
from outlast.errors import CheckpointError, CheckpointMismatch, CheckpointReadError

log = logging.getLogger("outlast.elastic")

_CLOSE_S = 10.0

_open: tuple[str, Checkpointer] | None = None
_newest = 0
"""The step of the last save. It may still be in progress, after its process group was lost."""
_verified: dict[str, tuple[list[str], str]] = {}
"""By folder: the checkpoints there, and the one chosen and verified. So states loaded one by one
come from the same checkpoint, which is verified once.
"""


class MemoryFile:
    """A file in memory, which ends with this object and with what is open or mapped of it."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("outlast-state", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def open(self) -> BinaryIO:
        """Opens it, to read and to write."""
        return cast(BinaryIO, open(f"/proc/self/fd/{self._descriptor}", "r+b"))

    def tensor(self) -> torch.Tensor:
        """Its bytes, in the same memory."""
        size_bytes = os.fstat(self._descriptor).st_size
        if not size_bytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(self._descriptor, size_bytes), dtype=torch.uint8)


def begin(path: str, contents: Mapping[str, MemoryFile]) -> Callable[[], str]:
    """Begins to save into the folder of checkpoints `path`; returns once the contents are copied.
    What it returns waits until the checkpoint is committed, and returns its directory.
    """
    global _open, _newest
    folder = folder_of(path)
    if _open is not None and _open[0] != folder:
        release()
    if _open is None or not _open[1].in_use:
        # After a restart in place, the new checkpointer takes over from the one before.
        _open, _newest = (folder, Checkpointer(folder, group="alone", keep=1, linger=0)), 0
    steps = [step for step, _ in candidates(LocalStorage(folder))]
    _newest = max(_newest, *steps, 0) + 1
    tensors = {name: each.tensor() for name, each in contents.items()}
    handle = _open[1].save(_newest, tensors)

    def finish() -> str:
        _, directory = LocalStorage(folder).names_for(handle.result(), "")
        return f"{folder}/{directory}"

    return finish


def release() -> None:
    """Closes the checkpointer of this process, if there is one, so that another process may save
    into its folder.
    """
    global _open
    found, _open = _open, None
    if found is not None:
        with contextlib.suppress(CheckpointError):  # `finish` raises it where it is awaited
            found[1].close(_CLOSE_S)


def choose(path: str) -> tuple[str, str] | None:
    """The newest valid checkpoint: the folder of checkpoints, and the name of its directory. Reads
    every byte of it. A `CheckpointError` if none is valid (names what is wrong with each), or if
    one has a later format, or cannot be read now, which must not be skipped.
    """
    storage = LocalStorage(folder_of(path))
    there = [folder for _, folder in candidates(storage)]
    before, chosen = _verified.get(storage.where, ([], ""))
    if before == there and there:
        return storage.where, chosen
    wrong = []
    for folder in there:
        try:
            verify_folder(storage, folder)
        except (CheckpointMismatch, CheckpointReadError):
            raise  # it may be intact
        except CheckpointError as e:
            wrong.append(str(e))
            log.warning("passed over a checkpoint: %s", e)
        else:
            _verified[storage.where] = there, folder
            return storage.where, folder
    if wrong:
        raise CheckpointError(f"no checkpoint in {path} is valid:\n  " + "\n  ".join(wrong))
    return None


def forget_choices() -> None:
    """A checkpoint that has become unreadable is verified again."""
    _verified.clear()


def folder_of(path: str) -> str:
    """The folder of the states' checkpoints: a `Job` may have others in `path` itself."""
    return os.path.join(os.path.abspath(path), "states")
