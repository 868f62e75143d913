"""`BackgroundCheckpointIO`: Lightning's own checkpoints, written in the background and verified."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.io import CheckpointIO

from outlast.integrations.lightning.checkpoint_folder import CheckpointFolder, pointed


class BackgroundCheckpointIO(CheckpointIO):
    """Saves the checkpoints of `ModelCheckpoint` in the background, and loads them verified.

        trainer = L.Trainer(callbacks=[ModelCheckpoint(...)], plugins=[BackgroundCheckpointIO()])

    A `.ckpt` file only names the checkpoint, which is in the folder `.outlast` next to it. The file
    appears when the checkpoint is durable. A checkpoint that is removed stays until the saves that
    began before have ended, and if the last of them fails, it is kept.

    `LightningModule.load_from_checkpoint` does not read these files: call `load_checkpoint` of an
    object of this class, and give its "state_dict" to the module. Use `save_last=True`, not
    `save_last="link"`: the link would point to a file that appears later.

    Args:
        options: passed to `Checkpointer`: `max_in_flight`, `on_failure`, `timeout`, ...
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._folders: dict[Path, CheckpointFolder] = {}
        self._handled = sys.exc_info()[1]  # a fit may begin where an earlier error is handled

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Returns as soon as training may continue. Lightning calls it on rank 0."""
        if storage_options is not None:
            raise TypeError("storage_options are not supported")
        self._folder(path).save(checkpoint, Path(path))

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint, each byte of which is verified; or a file that Lightning has written.
        Call it on all ranks: rank 0 reads, and sends the checkpoint to the others.

        Args:
            weights_only: `False` loads any object, which may run code: for trusted checkpoints.

        Raises:
            CheckpointError: on all ranks, if it is damaged, or `weights_only` refuses an object.
        """
        several = dist.is_initialized() and dist.get_world_size() > 1
        result: list[Any] = [None]
        if not several or dist.get_rank() == 0:
            try:
                if pointed(Path(path)) is not None:
                    result = [self._folder(path).load(Path(path), weights_only is not False)]
            except Exception as e:  # noqa: BLE001 - raised below, on all ranks
                result = [e]
        if several:
            dist.broadcast_object_list(result, 0)
        loaded = result[0]
        if isinstance(loaded, Exception):
            raise loaded
        if loaded is None:
            loaded = TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
        checkpoint: dict[str, Any] = loaded
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint when the saves in progress are committed."""
        folder = self._folders.get(Path(path).resolve().parent)
        if pointed(Path(path)) is not None or (folder is not None and folder.has(Path(path))):
            self._folder(path).remove(Path(path))
        else:
            TorchCheckpointIO().remove_checkpoint(path)

    def teardown(self) -> None:
        """Waits for the saves in progress; after a fault it does not, and drops them."""
        folders, self._folders = list(self._folders.values()), {}
        # Lightning also calls this where it handles the exception that has ended a fit.
        error = sys.exc_info()[1]
        kind = None if error is None or error is self._handled else type(error)
        with contextlib.ExitStack() as stack:  # if one raises, the others are closed all the same
            for folder in folders:
                stack.callback(folder.close, kind)

    def _folder(self, path: str | os.PathLike[str]) -> CheckpointFolder:
        parent = Path(path).resolve().parent
        if parent not in self._folders:
            self._folders[parent] = CheckpointFolder(parent, self._options)
        return self._folders[parent]
