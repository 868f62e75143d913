"""The plan and the end of a save in the background with torch.distributed.checkpoint."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from outlast.compat.nvrx.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync

__all__ = [
    "init_checkpoint_metadata_cache",
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
]


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
