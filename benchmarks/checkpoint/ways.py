"""Ways to save a checkpoint: `Checkpointer`, those of torch, and those of other libraries.

torch 2.13 has no newer stager than `DefaultStager`, but in `checkpoint._experimental`, whose parts
are those of torch-checkpointing. nvidia-resiliency-ext is not included: the core of its async
checkpoint requires CUDA.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from benchmarks.checkpoint.libraries import (
    LIBRARIES,
    LmResiliency,
    TorchCheckpointing,
    installed,
    remove,
)
from benchmarks.checkpoint.training_state import Training
from outlast.async_checkpoint import Checkpointer, Retention

__all__ = ["OURS", "PEERS", "Way", "chosen", "make"]

OURS = {
    "ours, eager": (False, 1),
    "ours, overlapped": (True, 1),
    "ours, eager, 2 in flight": (False, 2),
    "ours, overlapped, 2 in flight": (True, 2),
}
PEERS = (
    "torch.save",
    "dcp.save",
    "dcp.async_save",
    "async_save, cached stager",
    "async_save, cached stager, staged beside",
    "async_save, cached stager, a process",
    "fork",
    *LIBRARIES,
)


class Way(Protocol):
    """A way to save."""

    def save(self, state: Mapping[str, Any], step: int) -> Callable[[], None]:
        """Saves; the returned function waits until the checkpoint is durable."""
        ...

    def before_step(self) -> None:
        """Waits until the optimizer may step."""
        ...

    def close(self) -> None:
        """Ends background work, and removes the written files."""
        ...


def chosen(names: Iterable[str], quick: bool) -> list[str]:
    """The names to measure, without those of libraries that are not installed; a quick run omits
    torch's way that starts another Python process.
    """
    return [
        name for name in names if installed(name) and not (quick and name.endswith("a process"))
    ]


def make(name: str, folder: Path, job: Training) -> Way:
    """Creates the way of that name, which writes below `folder`."""
    path = folder / name.replace(" ", "-").replace(",", "")
    path.mkdir(parents=True, exist_ok=True)
    if name in OURS:
        overlapped, in_flight = OURS[name]
        return _CheckpointerWay(path, job, overlapped, in_flight)
    if name == "torch.save":
        return _TorchSave(path)
    if name == "fork":
        return _Fork(path)
    if name == "dcp.save":
        return _Dcp(path)
    if name == "lm-resiliency":
        return LmResiliency(path, job)
    if name in LIBRARIES:
        return TorchCheckpointing(path, beside=name.endswith("beside"))
    return _AsyncSave(path, name)


class _CheckpointerWay:
    def __init__(self, path: Path, job: Training, overlapped: bool, in_flight: int) -> None:
        self._path = path
        self.checkpointer = Checkpointer(
            path,
            keep=Retention(last=1),
            overlap=job.optimizer if overlapped else (),
            max_in_flight=in_flight,
        )

    def save(self, state: Mapping[str, Any], step: int) -> Callable[[], None]:
        return self.checkpointer.save(step, state).wait

    def before_step(self) -> None:
        pass  # the optimizer's step waits without help

    def close(self) -> None:
        self.checkpointer.close()
        remove(self._path)


class _TorchWay:
    """Overwrites two folders in turn, so the previous checkpoint is always complete, and nothing
    has to be removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")

    def place(self, step: int) -> Path:
        return self.path / str(step % 2)

    def before_step(self) -> None:
        pass

    def close(self) -> None:
        remove(self.path)


class _TorchSave(_TorchWay):
    def save(self, state: Mapping[str, Any], step: int) -> Callable[[], None]:
        rank = os.environ.get("RANK", "0")
        file = open(f"{self.place(step)}-{rank}", "wb")  # noqa: SIM115 - closed when durable
        torch.save(state, file)

        def wait() -> None:
            with file:
                file.flush()
                os.fsync(file.fileno())

        return wait


class _Fork(_TorchWay):
    """A copy-on-write snapshot; training then pays for each page that it modifies."""

    def save(self, state: Mapping[str, Any], step: int) -> Callable[[], None]:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                _TorchSave(self.path).save(state, step)()
                code = 0
            finally:
                os._exit(code)

        def wait() -> None:
            if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
                raise RuntimeError("the forked child could not save")

        return wait


class _Dcp(_TorchWay):
    def save(self, state: Mapping[str, Any], step: int) -> Callable[[], None]:
        save(dict(state), checkpoint_id=self.place(step), no_dist=not dist.is_initialized())
        return lambda: None


class _AsyncSave(_TorchWay):
    """`async_save`; waits for the previous save, as its documentation requires."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path)
        self._stager = None
        self._type = AsyncCheckpointerType.THREAD
        if name.endswith("a process"):
            self._type = AsyncCheckpointerType.PROCESS
        if "cached" in name:
            # Pinned memory and non-blocking copies require CUDA.
            in_process = self._type is AsyncCheckpointerType.PROCESS
            self._stager = DefaultStager(
                StagingOptions(False, in_process, name.endswith("beside"), False)
            )
        self._last: Future[Any] | None = None
        self._staged: Future[Any] | None = None

    def save(self, state: Mapping[str, Any], step: int) -> Callable[[], None]:
        if self._last is not None:
            self._last.result()
        found: Any = async_save(
            dict(state),
            checkpoint_id=self.place(step),
            async_checkpointer_type=self._type,
            async_stager=self._stager,
            no_dist=not dist.is_initialized(),
        )
        if isinstance(found, Future):
            self._last = found
        else:
            self._last, self._staged = found.upload_completion, found.staging_completion
        return cast("Callable[[], None]", self._last.result)

    def before_step(self) -> None:
        if self._staged is not None:
            self._staged.result()

    def close(self) -> None:
        if self._last is not None:
            self._last.result()
        if self._stager is not None:
            self._stager.close()
        super().close()
