"""The checkpoints of states: rank 0's `Checkpointer` alone saves a tensor of bytes for each."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping

from outlast.async_checkpoint import Checkpointer, SaveHandle
from outlast.async_checkpoint.inspection import LocalStorage, candidates
from outlast.elastic.states.content import MemoryFile
from outlast.errors import CheckpointError

_CLOSE_S = 10.0

_open: tuple[str, Checkpointer] | None = None
_newest = 0
"""The step of the last save. It may still be in progress, after its process group was lost."""


@dataclasses.dataclass(frozen=True)
class Begun:
    """A save that is written in the background, into the folder of checkpoints `path`."""

    handle: SaveHandle
    path: str

    def finish(self) -> str:
        """Waits until the checkpoint is committed, and returns its directory."""
        step = self.handle.result()
        (directory,) = (f for s, f in candidates(LocalStorage(folder_of(self.path))) if s == step)
        return f"{folder_of(self.path)}/{directory}"


def begin(path: str, contents: Mapping[str, MemoryFile]) -> Begun:
    """Begins to save; returns once the contents are copied."""
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
    return Begun(_open[1].save(_newest, tensors), path)


def release() -> None:
    """Closes the checkpointer of this process, if there is one, so that another process may save
    into its folder.
    """
    global _open
    found, _open = _open, None
    if found is not None:
        with contextlib.suppress(CheckpointError):  # `finish` raises it where it is awaited
            found[1].close(_CLOSE_S)


def folder_of(path: str) -> str:
    """The folder of the states' checkpoints: a `Job` may have others in `path` itself."""
    return os.path.join(os.path.abspath(path), "states")
