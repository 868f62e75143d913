"""Refuses a state dict in which some tensors of a sharded model are DTensors and others are whole.

The optimizer of a sharded model (FSDP2) has no state before its first step, so its `state_dict()`
has an empty dict, which a restore would fill with whole tensors. torch loads them next to
parameters that are DTensors, and the next step fails: after every restart again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from outlast.async_checkpoint.restore.fit import Index
from outlast.async_checkpoint.state_dict.sharding import Item
from outlast.async_checkpoint.state_dict.tree import look_up, nodes
from outlast.errors import CheckpointMismatch

_SHOWN = 3


def check_mixture(
    state_dict: Mapping[str, Any],
    items: Sequence[Item],
    filled: Iterable[dict[Any, Any]],
    index: Index,
    where: str,
) -> None:
    """Checks the tensors of a state dict that has DTensors. `filled` are the dicts that were empty.

    Raises:
        CheckpointMismatch: if a tensor that was saved in parts is whole here, or if a dict was
            filled with whole tensors of the shape of a DTensor, such as an optimizer's moments;
            names the fix.
    """
    shapes = {tuple(leaf.shape) for _, leaf in nodes(state_dict) if isinstance(leaf, DTensor)}
    if not shapes:
        return
    added = {id(leaf) for each in filled for _, leaf in nodes(each)}
    whole = []
    for item in items:
        entry = index.tensors.get(item.name)
        leaf = look_up(state_dict, item.path)
        if entry is None or not item.shape or not _is_plain(leaf):
            continue
        if len(entry.shards) > 1 or (id(leaf) in added and item.shape in shapes):
            whole.append(item.name)
    if whole:
        more = f" and {len(whole) - _SHOWN} more" if len(whole) > _SHOWN else ""
        names = ", ".join(map(repr, whole[:_SHOWN]))
        raise CheckpointMismatch(
            f"{where} cannot be restored into a mixture of DTensors and whole tensors: {names}"
            f"{more} would be whole next to DTensors, which an optimizer cannot step. Build the "
            "state dict with get_state_dict(model, optimizer) of torch.distributed.checkpoint."
            "state_dict, which creates the optimizer's state as DTensors, and load it with "
            "set_state_dict; or use outlast.Job"
        )


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
