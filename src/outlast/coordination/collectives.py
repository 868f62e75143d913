"""The few small collectives that this package needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from outlast.errors import AsyncCallError


def rank_of(group: Any) -> int:
    """This rank in the group; 0 without a group."""
    return dist.get_rank(group) if _several(group) else 0


def least(value: int, group: Any = None) -> int:
    """The minimum of the values of all ranks: a collective. Without a group, the value itself."""
    if not _several(group):
        return value
    tensor = torch.tensor([value], dtype=torch.int64, device=_device(group))
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group)
    return int(tensor.item())


def raise_together(error: Exception | None, what: str, rank: int, group: Any = None) -> None:
    """Raises on every rank if one has an error: a collective, and so a barrier too.

    Raises:
        Exception: `error`, if this rank has one.
        AsyncCallError: on the other ranks; names one on which `what` happened.
    """
    no_rank = 1 << 62
    first = least(no_rank if error is None else rank, group)
    if error is not None:
        raise error
    if first != no_rank:
        raise AsyncCallError(f"{what} on rank {first}: its own error says why")


def _several(group: Any) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _device(group: Any) -> torch.device:
    resolved: Any = dist.group.WORLD if group is None else group
    kinds = [device.type for device in resolved._device_types]
    # NCCL takes only tensors on the GPU; gloo takes both, and those on the CPU need no copy.
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])
