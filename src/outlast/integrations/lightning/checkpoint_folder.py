"""The checkpoints of one folder that Lightning saves into, in a `Checkpointer` of this rank alone.

Each `.ckpt` file is a *pointer*: the number of a checkpoint in the folder `.outlast` next to it. A
pointer is written after the commit of its checkpoint. Checkpoints to which no pointer leads are
deleted later, so a crash at any time leaves no pointer without a checkpoint.
"""

from __future__ import annotations

import io
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from outlast.async_checkpoint import Checkpointer, SaveHandle
from outlast.coordination.training_step import report_step
from outlast.errors import CheckpointError

_KEY = "outlast checkpoint"
_POINTER_BYTES = 100  # at most
_TENSOR = "outlast tensor"


class CheckpointFolder:
    """Saves, loads and removes the checkpoints of `folder`."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # Lightning saves on one rank only.
        group = (
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
            if dist.is_initialized()
            else None
        )
        self._checkpointer = Checkpointer(folder / ".outlast", group=group, **options)
        self._last: SaveHandle | None = None
        self._saves: dict[int, SaveHandle] = {}  # those in progress, by number
        self._unwritten: list[Path] = []  # the pointers of those in progress
        self._next = max((info.step for info in self._checkpointer.checkpoints()), default=-1) + 1

    def save(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Saves in the background; `path` appears when the checkpoint is committed."""
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
        self._saves[number] = self._last
        report_step(int(checkpoint.get("global_step", number)))  # the number is none of training
        self._unwritten.append(path)
        self._last.add_done_callback(partial(self._saved, path, number))

    def load(self, path: Path, weights_only: bool) -> dict[str, Any]:
        """Loads the checkpoint to which `path` points.

        Raises:
            CheckpointError: if it is damaged, or is not there.
        """
        number = _pointed(path)
        state: dict[str, Any] = {"lightning": {}}
        if number is None or self._checkpointer.restore(state, step=number) is None:
            raise CheckpointError(f"there is no checkpoint {number} for {path} in {self._folder}")
        found = state["lightning"]
        rest = io.BytesIO(found["rest"].numpy().tobytes())
        structure = torch.load(rest, map_location="cpu", weights_only=weights_only)
        checkpoint: dict[str, Any] = _put_tensors(structure, found.get("tensors", {}))
        return checkpoint

    def has(self, path: Path) -> bool:
        """Whether `path` is a pointer, or will be when its save has ended."""
        return path in self._unwritten or is_pointer(path)

    def remove(self, path: Path) -> None:
        """Removes `path` when the last save is committed; not if that fails."""
        if self._last is None:
            path.unlink(missing_ok=True)
        else:
            self._last.add_done_callback(partial(_unlink, path))

    def close(self, kind: type[BaseException] | None) -> None:
        """Waits for the saves; not after an error of this kind that a restart follows."""
        if kind is None:
            self._checkpointer.wait()
            self._delete_unneeded()
        self._checkpointer.__exit__(kind)

    def _saved(self, path: Path, number: int, handle: Any) -> None:
        try:
            _point(path, number, handle)
        finally:
            self._unwritten.remove(path)  # only now: see `has`

    def _delete_unneeded(self) -> None:
        """Deletes checkpoints without a pointer, except the newest that has ended: its pointer may
        be about to be written.
        """
        self._saves = {n: handle for n, handle in self._saves.items() if not handle.done()}
        newest = min(self._saves, default=self._next) - 1
        pointed = {_pointed(each) for each in self._folder.iterdir() if is_pointer(each)}
        for info in self._checkpointer.checkpoints():
            if info.step < newest and info.step not in pointed:
                self._checkpointer.delete(info.step)


def is_pointer(path: Path) -> bool:
    """Whether a file is a pointer, and not a checkpoint that Lightning has written."""
    return _pointed(path) is not None


def _pointed(path: Path) -> int | None:
    if not path.is_file() or path.stat().st_size > _POINTER_BYTES:
        return None
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return None
    number = content.get(_KEY) if isinstance(content, dict) else None
    return number if isinstance(number, int) else None


def _point(path: Path, number: int, handle: Any) -> None:
    """On another thread, when the save has ended: writes the pointer, durably."""
    if handle.cancelled() or handle.unseen_error is not None:
        return  # the next save raises the error
    partly = path.with_name(f".{path.name}.partial")
    with partly.open("w") as file:
        json.dump({_KEY: number}, file)
        file.flush()
        os.fsync(file.fileno())
    partly.replace(path)


def _unlink(path: Path, handle: Any) -> None:
    if not handle.cancelled() and handle.unseen_error is None:
        path.unlink(missing_ok=True)


def _take_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with a mark in place of each tensor, which is appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return (_TENSOR, len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _take_tensors(inner, tensors) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take_tensors(inner, tensors) for inner in value)
    return value


def _put_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if type(value) is tuple and len(value) == 2 and value[0] == _TENSOR:
        return tensors[str(value[1])]
    if isinstance(value, dict):
        return {key: _put_tensors(inner, tensors) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_tensors(inner, tensors) for inner in value)
    return value
