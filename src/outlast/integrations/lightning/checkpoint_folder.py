"""The checkpoints of one folder that Lightning saves into, in a `Checkpointer` of this rank alone.

Each `.ckpt` file is a *pointer*: the number of a checkpoint in the folder `.outlast` next to it. A
pointer is written after the commit of its checkpoint, and durable before anything older is removed.
Checkpoints to which no pointer leads are deleted later, once the removal of their pointers is
durable. So a power loss leaves no pointer without a checkpoint, and the newest durable pointer.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from outlast.async_checkpoint import Checkpointer, SaveHandle
from outlast.coordination.training_step import report_step
from outlast.errors import CheckpointError
from outlast.system.error_text import first_line
from outlast.system.files import fsync_folder, replacing

log = logging.getLogger("outlast.integrations")

_KEY = "outlast checkpoint"
_POINTER_BYTES = 100  # at most
_PARTIAL = ".partial"  # a pointer that is being written, or that a crash has left
_TENSOR = "outlast tensor"


class CheckpointFolder:
    """Saves, loads and removes the checkpoints of `folder`."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self._folder = folder  # created by the checkpointer, durably
        # Lightning saves on one rank only.
        group = None
        if dist.is_initialized():
            group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._checkpointer = Checkpointer(folder / ".outlast", group=group, **options)
        self._last: SaveHandle | None = None
        self._unwritten: dict[int, Path] = {}  # the pointers of the saves in progress, by number
        self._unnamed: set[int] = set()  # committed, but its pointer could not be written
        self._errors: deque[CheckpointError] = deque()  # to be raised on the training thread
        self._next = max((info.step for info in self._checkpointer.checkpoints()), default=-1) + 1

    def save(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Saves in the background; `path` appears at the commit. Raises an earlier save's error."""
        if self._errors:
            raise self._errors.popleft()
        self._delete_unneeded()
        tensors: list[torch.Tensor] = []
        buffer = io.BytesIO()
        torch.save(_take_tensors(checkpoint, tensors), buffer)
        state = {
            "rest": torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8),
            "tensors": {str(i): tensor for i, tensor in enumerate(tensors)},
        }
        number, self._next = self._next, self._next + 1
        self._last = self._checkpointer.save(number, {"lightning": state})
        report_step(int(checkpoint.get("global_step", number)))  # the number is none of training
        self._unwritten[number] = path
        self._last.add_done_callback(partial(self._saved, path, number))

    def load(self, path: Path, weights_only: bool) -> dict[str, Any]:
        """Loads the checkpoint of `path`; a `CheckpointError` if it is missing or refused."""
        number = pointed(path)
        state: dict[str, Any] = {"lightning": {}}
        if number is None or self._checkpointer.restore(state, step=number) is None:
            raise CheckpointError(f"there is no checkpoint {number} for {path} in {self._folder}")
        found = state["lightning"]
        rest = io.BytesIO(found["rest"].numpy().tobytes())
        try:
            structure = torch.load(rest, map_location="cpu", weights_only=weights_only)
        except pickle.UnpicklingError as e:
            raise CheckpointError(
                f"{path} cannot be loaded: {first_line(e)}. If you trust the checkpoint, "
                "weights_only=False loads any Python object"
            ) from e
        checkpoint: dict[str, Any] = _put_tensors(structure, found.get("tensors", {}))
        return checkpoint

    def has(self, path: Path) -> bool:
        """Whether `path` is a pointer, or will be when its save has ended."""
        return path in list(self._unwritten.values()) or pointed(path) is not None

    def remove(self, path: Path) -> None:
        """Removes `path` when the last save is committed, and has its pointer; not if it fails."""
        if self._last is None:
            path.unlink(missing_ok=True)
        else:
            self._last.add_done_callback(partial(self._unlink, path, self._next - 1))

    def close(self, kind: type[BaseException] | None) -> None:
        """Waits for the saves, and raises as `save`; before a restart it only logs."""
        try:
            if kind is None:
                self._checkpointer.wait()
                self._delete_unneeded()
        finally:
            self._checkpointer.__exit__(kind)
        while self._errors:
            error = self._errors.popleft()
            if kind is None:
                raise error
            log.error("%s", error)

    # The callbacks of a save: on the checkpointer's thread, or on this one if the save has ended.

    def _saved(self, path: Path, number: int, handle: SaveHandle) -> None:
        """Writes the pointer of a committed save, durably. If it failed, the next save raises."""
        try:
            if handle.succeeded:
                _point(path, number)
        except OSError as e:
            self._unnamed.add(number)
            error = CheckpointError(
                f"{path} could not be written, although its checkpoint is committed: {e}. Make "
                "room there, or correct the permissions. The checkpoint before it is kept"
            )
            error.__cause__ = e
            self._errors.append(error)
        finally:
            del self._unwritten[number]  # only now: see `has` and `_delete_unneeded`

    def _unlink(self, path: Path, number: int, handle: SaveHandle) -> None:
        try:
            if handle.succeeded and number not in self._unnamed:
                path.unlink(missing_ok=True)
        except OSError as e:
            log.warning("%s could not be removed: %s", path, e)

    def _delete_unneeded(self) -> None:
        """Deletes the checkpoints without a pointer that are older than the saves in progress; not
        those whose pointer could not be written.

        The order of the reads: those in progress first. Another thread writes pointers meanwhile; a
        save that has ended by then has its pointer before the pointers are read.
        """
        oldest = min(list(self._unwritten), default=self._next)
        kept = {pointed(each) for each in self._folder.iterdir() if each.suffix != _PARTIAL}
        kept |= self._unnamed
        steps = [info.step for info in self._checkpointer.checkpoints()]
        unneeded = [step for step in steps if step < oldest and step not in kept]
        if unneeded:
            fsync_folder(self._folder)  # else a removed pointer may be back after a power loss
        for step in unneeded:
            self._checkpointer.delete(step)


def pointed(path: Path) -> int | None:
    """The number in a pointer; `None` for Lightning's own file, or one just renamed or removed."""
    try:
        with path.open("rb") as file:
            text = file.read(_POINTER_BYTES + 1)
        content = json.loads(text) if len(text) <= _POINTER_BYTES else None
    except (FileNotFoundError, IsADirectoryError, ValueError):
        return None
    number = content.get(_KEY) if isinstance(content, dict) else None
    return number if isinstance(number, int) else None


def _point(path: Path, number: int) -> None:
    with replacing(path, path.with_name(f".{path.name}{_PARTIAL}")) as file:
        file.write(json.dumps({_KEY: number}).encode())


def _take_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with a mark in place of each tensor, which is appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return (_TENSOR, len(tensors) - 1)
    return mapped(value, lambda inner: _take_tensors(inner, tensors))


def _put_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if type(value) is tuple and len(value) == 2 and value[0] == _TENSOR:
        return tensors[str(value[1])]
    return mapped(value, lambda inner: _put_tensors(inner, tensors))


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value`; a container with `function` applied to what it holds."""
    if isinstance(value, dict):
        return {key: function(inner) for key, inner in value.items()}
    return type(value)(map(function, value)) if type(value) in (list, tuple) else value
