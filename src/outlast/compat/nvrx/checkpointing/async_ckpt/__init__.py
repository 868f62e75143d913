"""Background calls and saves with the names of nvidia_resiliency_ext.checkpointing.async_ckpt 0.4.

A background process that fails or dies fails its call on all ranks, and is not finalized. All the
names are in this file; the modules of 0.4 are other names of it.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.utils._pytree import tree_map

from outlast import async_checkpoint
from outlast.coordination.collectives import least

for _module in (
    "cached_metadata_filesystem_reader",
    "core",
    "filesystem_async",
    "state_dict_saver",
    "torch_ckpt",
):
    sys.modules[f"{__name__}.{_module}"] = sys.modules[__name__]


class AsyncRequest(NamedTuple):
    """`outlast.async_checkpoint.AsyncRequest`, with two more attributes.

    Attributes:
        preload_fn: runs in this process when the request is scheduled; its result replaces
            `async_fn_args[1]`.
        call_idx: accepted; the queue numbers its calls itself.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 - read, and never written
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        if self.is_frozen:
            raise RuntimeError("the request is frozen: no finalize function can be added")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        return self._replace(is_frozen=True)

    def execute_sync(self) -> None:
        _preloaded(self).execute_sync()

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Runs the finalize functions; returns the index of the call."""
        for fn in self.finalize_fns:
            fn()
        return self.call_idx


class AsyncCaller(async_checkpoint.DistributedAsyncCaller):
    """`outlast.async_checkpoint.DistributedAsyncCaller`, which takes requests."""

    def schedule_async_call(self, async_req: Any) -> None:  # type: ignore[override]
        request = _preloaded(async_req)
        super().schedule_async_call(
            request.async_fn, request.async_fn_args, request.async_fn_kwargs
        )

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        return super().is_current_async_call_done(blocking, no_dist)

    def sync_all_async_calls(self, is_alive: int) -> bool:
        """Whether the call of no rank is alive: a collective."""
        return bool(least(int(not is_alive)))

    def close(self, abort: bool = False) -> None:
        """Waits for the call, or kills it with `abort`. Another one may follow."""
        try:
            if not abort:
                super().is_current_async_call_done(blocking=True)
        finally:
            super().close()


class TemporalAsyncCaller(AsyncCaller):
    """Runs each call in a fork of this process."""


class PersistentAsyncCaller(AsyncCaller):
    """Runs all calls in one process; functions and arguments are pickled.

    Args:
        cpu_priority: niceness of the process. The others, also of later versions, have no effect.
    """

    def __init__(
        self,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        super().__init__(persistent=True, nice=cpu_priority)


class AsyncCallsQueue(async_checkpoint.AsyncCallsQueue):
    """`outlast.async_checkpoint.AsyncCallsQueue`, persistent by default as in 0.4.

    Args:
        persistent: run all calls in one process; functions and arguments are pickled.
        cpu_priority, and others: see `PersistentAsyncCaller`.
    """

    def __init__(
        self,
        persistent: bool = True,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        super().__init__(persistent, nice=cpu_priority)

    def schedule_async_request(self, async_request: Any) -> int:
        return super().schedule_async_request(_preloaded(async_request))

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        return super().maybe_finalize_async_calls(blocking, no_dist)

    def close(self, abort: bool = False) -> None:  # type: ignore[override]
        """Finalizes all calls, or kills and drops them with `abort`, and ends the process. The next
        request starts another one, with index 0.
        """
        try:
            self.abort() if abort else super().close()
        finally:
            self._closed, self._next_index = False, 0


def _preloaded(request: Any) -> async_checkpoint.AsyncRequest:
    """The request of `outlast.async_checkpoint`, after `preload_fn` has run."""
    arguments = list(request.async_fn_args)
    preload = getattr(request, "preload_fn", None)
    if preload is not None and request.async_fn is not None:
        arguments[1] = preload()
    return async_checkpoint.AsyncRequest(
        request.async_fn,
        tuple(arguments),
        list(request.finalize_fns),
        dict(request.async_fn_kwargs or {}),
    )


class TorchAsyncCheckpoint:
    """Saves with `torch.save` in a background process.

    Args:
        persistent_queue: see `AsyncCallsQueue`.
    """

    def __init__(self, persistent_queue: bool = True) -> None:
        self.save = torch.save
        self._queue = AsyncCallsQueue(persistent=persistent_queue)

    def async_save(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        """Saves a copy of the state as it is now; the arguments are those of `torch.save`."""
        copied = tree_map(_on_host, state_dict)
        self._queue.schedule_async_request(AsyncRequest(torch.save, (copied, *args), [], kwargs))

    def finalize_async_save(
        self, blocking: bool = False, no_dist: bool = True, terminate: bool = False
    ) -> None:
        """Checks the saves, and raises the error of one that has failed.

        Args:
            blocking: whether to wait for all saves.
            no_dist: whether ranks may check at different times.
            terminate: whether to close the queue afterwards.
        """
        self._queue.maybe_finalize_async_calls(blocking, no_dist=no_dist)
        if terminate:
            self._queue.close()

    def close(self, abort: bool = False) -> None:
        """Waits for the saves, or drops them with `abort`, and ends the background process."""
        self._queue.close(abort)


class CachedMetadataFileSystemReader(FileSystemReader):
    """`torch.distributed.checkpoint.FileSystemReader`; `read_metadata` reads the file once."""

    _metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata


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
        return write, functools.partial(tree_map, _on_host, self._data), [self._results, self._data]

    def retrieve_write_results(self) -> list[WriteResult]:
        """What the background process has written; for `finish`."""
        if self._plan is None or not self._plan.items:
            return []
        with self._exchange:
            results: list[WriteResult] = pickle.loads(Path(self._results).read_bytes())
        return results

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
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


def init_checkpoint_metadata_cache(cached_global_metadata: Metadata | None = None) -> None:
    """Does nothing: every save makes its plan."""


def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: Any = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    enable_cache: bool = False,
    metadata_cache: Any = None,
) -> tuple[FileSystemWriterAsync, Metadata | None, _DistWrapper]:
    """Plans a save, on all ranks of the group; the storage writer then has what this rank writes.

    Args:
        state_dict, storage_writer, process_group, coordinator_rank, planner: as in
            `torch.distributed.checkpoint.save`.
        enable_cache, metadata_cache: accepted; plans are not cached.

    Returns:
        The arguments of `save_state_dict_async_finalize`.
    """
    group = _DistWrapper(process_group, dist.is_initialized(), coordinator_rank)
    plans = DefaultSavePlanner() if planner is None else planner
    metadata: Metadata | None = None

    def local() -> SavePlan:
        plans.set_up_planner(state_dict, is_coordinator=group.is_coordinator)
        storage_writer.set_up_storage_writer(group.is_coordinator)
        return storage_writer.prepare_local_plan(plans.create_local_plan())

    def together(local_plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        global_plans, metadata = plans.create_global_plan(local_plans)
        return storage_writer.prepare_global_plan(global_plans)

    plan = plans.finish_plan(group.reduce_scatter("plan", local, together))
    storage_writer.prepare_write_data(plan, plans)
    return storage_writer, metadata, group


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync,
    global_metadata: Metadata | None,
    dist_wrapper: _DistWrapper,
) -> None:
    """Makes the checkpoint loadable, once all ranks have written: a finalize function.

    Raises:
        torch.distributed.checkpoint.api.CheckpointException: on all ranks, if one cannot say what
            it has written, or the metadata cannot be written.
    """

    def finish(results: list[Any]) -> None:
        assert global_metadata is not None, "the coordinator has made the metadata"
        storage_writer.finish(global_metadata, results)

    dist_wrapper.all_reduce("write", storage_writer.retrieve_write_results, finish)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


vars()["__all__"] = [  # see `system.lazy_exports`
    name
    for name, each in [*vars().items()]
    if getattr(each, "__module__", "") == __name__ and not name.startswith("_")
]
