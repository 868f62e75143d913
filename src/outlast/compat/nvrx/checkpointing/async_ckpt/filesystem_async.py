"""`FileSystemWriterAsync`: torch.distributed.checkpoint's file writer, in a background process."""

from __future__ import annotations

import functools
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

__all__ = ["FileSystemWriterAsync"]


class FileSystemWriterAsync(FileSystemWriter):
    """Writes one checkpoint in the format of torch.distributed.checkpoint, in three parts: the plan
    (`save_state_dict_async_plan`), the writing, by the function that `get_save_function_and_args`
    returns, in any process, and `save_state_dict_async_finalize`.

    Args:
        path: of the checkpoint.
        args, kwargs: those of `torch.distributed.checkpoint.FileSystemWriter`.
        separation_hint: accepted; all items of a rank go to the files of that rank.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        separation_hint: str | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("use_msc", False):
            raise ValueError("use_msc=True is not supported: the writer writes to a file system")
        super().__init__(path, *args, **kwargs)
        self.checkpoint_dir, self.separation_hint = path, separation_hint
        self._make = functools.partial(FileSystemWriter, path, *args, **kwargs)
        # Private to this user: what is read back from it is unpickled. Other users may be able to
        # write to the checkpoint's folder.
        self._exchange = tempfile.TemporaryDirectory(prefix="outlast-save-")
        self._plan: SavePlan | None = None
        self._data: dict[MetadataIndex, Any] = {}

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Collects what this rank writes. Tensors are copied when the request is scheduled."""
        self._plan = plan
        self._data = {item.index: _detached(planner.resolve_data(item)) for item in plan.items}

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., None] | None, Callable[[], Any] | None, Any]:
        """The function that writes, the one that copies the tensors to host memory, and the
        arguments of the first; `(None, None, ())` if this rank has nothing to write.
        """
        if self._plan is None or not self._plan.items:
            return None, None, ()
        write = functools.partial(_write, self._make, self._plan)
        return write, functools.partial(_on_host, self._data), [self._results, self._data]

    def retrieve_write_results(self) -> list[WriteResult]:
        """What the background process has written; for `finish`."""
        if self._plan is None or not self._plan.items:
            return []
        with self._exchange:
            results: list[WriteResult] = pickle.loads(Path(self._results).read_bytes())
        return results

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Not available: this writer writes in the background."""
        raise NotImplementedError("use get_save_function_and_args() and an AsyncCallsQueue")

    @property
    def _results(self) -> str:
        """The file in which the background process, on the same host, says what it has written."""
        return os.path.join(self._exchange.name, "results")


class _Resolved:
    """Stands in for the planner in the background process: the data is resolved already."""

    def __init__(self, data: dict[MetadataIndex, Any]) -> None:
        self._data = data

    def resolve_data(self, item: WriteItem) -> Any:
        return self._data[item.index]


def _write(
    make: Callable[[], FileSystemWriter],
    plan: SavePlan,
    results: str,
    data: dict[MetadataIndex, Any],
) -> None:
    """Runs in the background process."""
    written = make().write_data(plan, _Resolved(data)).wait()  # type: ignore[arg-type]
    partial = Path(f"{results}.tmp")
    partial.write_bytes(pickle.dumps(written))
    partial.replace(results)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _on_host(data: dict[MetadataIndex, Any]) -> dict[MetadataIndex, Any]:
    return {
        index: value.cpu() if isinstance(value, torch.Tensor) else value
        for index, value in data.items()
    }
