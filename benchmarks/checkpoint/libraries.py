"""Other libraries that save checkpoints, where they are installed, each as its documentation says.

torch-checkpointing stages into shared memory, from which a process of its own writes. It does not
sync files, and refuses to replace a checkpoint: its callbacks sync them, as the other ways do, and
remove the checkpoint before once the new one is complete.

lm-resiliency (GEMINI) keeps two checkpoints in the memory of the training process, and writes one
to disk in a thread. On CPU its copy is not asynchronous. Its copies at a peer are switched off,
since no other way makes any.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.checkpoint.training_state import Training

__all__ = ["LIBRARIES", "LmResiliency", "TorchCheckpointing", "installed", "remove"]

LIBRARIES = {
    "torch-checkpointing": "torch_checkpointing",
    "torch-checkpointing, staged beside": "torch_checkpointing",
    "lm-resiliency": "lm_resiliency",
}
"""The ways to save, and the package that each needs."""


def installed(name: str) -> bool:
    """Whether the package that a way needs is installed; torch's ways need none."""
    return name not in LIBRARIES or importlib.util.find_spec(LIBRARIES[name]) is not None


def remove(path: Path) -> None:
    """Removes a folder that all ranks have written into."""
    if os.environ.get("RANK", "0") == "0":
        shutil.rmtree(path, ignore_errors=True)


class TorchCheckpointing:
    """Its `CheckpointManager`, which also restores.

    Args:
        path: the folder of the checkpoints.
        beside: whether a thread stages, while the training goes on until its next update.
    """

    def __init__(self, path: Path, *, beside: bool = False) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._path = path
        self._beside = beside
        self._last: Future[Any] | None = None
        staging = CheckpointStagerConfig(use_async_staging=beside)
        self._manager: Any = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging),
                # Its default, O_DIRECT, fails where files' ends must be aligned, as on ext4.
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
                pre_finalize_callback=_sync_files,
                finalize_callback=_remove_others,
            )
        )

    def save(self, state: Mapping[str, Any], step: int) -> Callable[[], None]:
        """Saves as checkpoint `step`; waits for the save before, as the library does itself."""
        if self._last is not None:
            self._last.result()
        self._last = self._manager.save(str(self._path / str(step)), state)
        assert self._last is not None
        last = self._last
        return lambda: last.result()

    def before_step(self) -> None:
        """Waits until the state was staged."""
        if self._beside:
            with self._manager.lock():
                pass

    def load(self, step: int, state: Mapping[str, Any]) -> None:
        """Loads checkpoint `step` into the tensors of `state`."""
        self._manager.load(str(self._path / str(step)), into=state)

    def close(self) -> None:
        self._manager.close()
        remove(self._path)


def _sync_files(written: Any) -> None:
    """Called by each rank's process before the barrier; only its own files are not yet durable."""
    rank = os.environ.get("RANK", "0")
    for path in (*Path(written.path).glob(f"*_{rank}.pt"), Path(written.path)):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_others(written: Any) -> None:
    """Called by each rank's process after the barrier."""
    path = Path(written.path)
    for other in path.parent.iterdir():
        if other != path:
            remove(other)


class LmResiliency:
    """Its `InMemoryCheckpointManager`, which also restores.

    Args:
        path: the folder of the checkpoints on disk.
        job: the training, whose tensors are saved without a state dict: its faster way.
    """

    def __init__(self, path: Path, job: Training) -> None:
        from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig

        self._path = path
        self._job = job
        config = InMemoryCkptConfig(
            disk_flush_interval=0, disk_folder=str(path), run_id="benchmark", pin_memory=False
        )
        unreplicated = SimpleNamespace(has_natural_replicas=True)
        self._manager: Any = InMemoryCheckpointManager(config, parallelism_info=unreplicated)

    def save(self, state: Mapping[str, Any], step: int) -> Callable[[], None]:
        """Saves in memory, and begins to write that to disk, over the checkpoint before the last.

        There is no call that waits for the write, so this uses what its `close` does.
        """
        self._manager.save_tensors(self._job.tensors(), 1 + step % 2)  # it numbers from one
        self._manager.maybe_wait()
        self._manager.flush_to_disk()
        wait: Callable[[], None] = self._manager._disk.wait
        return wait

    def before_step(self) -> None:
        """The copy is made in `save`."""

    def load(self, _: Mapping[str, Any]) -> None:
        """Loads the newest checkpoint into the job: from this manager's memory, else from disk."""
        loaded = self._manager.load_tensors()
        if loaded is None:
            raise RuntimeError("lm-resiliency found no checkpoint")
        for tensor, saved in zip(self._job.tensors(), loaded[0], strict=True):
            tensor.copy_(saved)

    def close(self) -> None:
        self._manager.close()
        remove(self._path)
