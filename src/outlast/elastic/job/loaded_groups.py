"""The parameter groups of an optimizer, made of those of a checkpoint and the present ones.

The values of a group are replaced, whatever they are; where torch resumes, so does a job. A key
that only the present group has, as of a newer torch, stays. With names of the parameters on both
sides, the moments go to the parameter of the same name; torch goes by the order alone. A group that
was added in training is saved with the names of its parameters, and added again.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from outlast.elastic.wrapped_modules import plain_name
from outlast.errors import CheckpointMismatch

log = logging.getLogger("outlast.elastic")

_NAMES = "param_names"
ADDED = "outlast_parameters"


def add_groups(optimizer: torch.optim.Optimizer, module: nn.Module, saved: list[Any]) -> None:
    """Adds the groups that were added in training; `CheckpointMismatch` if a parameter lacks."""
    parameters = dict(module.named_parameters())
    for number, group in [*enumerate(saved)][len(optimizer.param_groups) :]:
        names = group.get(ADDED, [""])
        if not parameters.keys() >= {*names}:
            raise CheckpointMismatch(
                f"the optimizer has {number} parameter groups, {len(saved)} were saved, and the "
                f"model does not have all parameters of group {number}: {names[:10]}"
            )
        added = [parameters[name] for name in names]
        named = zip(group[_NAMES], added, strict=True) if _NAMES in group else added
        optimizer.add_param_group({"params": [*named]})


def loaded_group(
    number: int, group: dict[str, Any], loaded: dict[str, Any], *, is_torchs: bool
) -> dict[str, Any]:
    """The group to load; `CheckpointMismatch` if its parameter names differ or none was saved, or
    if an optimizer of torch has another number of parameters.
    """
    where = f"parameter group {number} of the optimizer"
    if not loaded:
        raise CheckpointMismatch(f"the checkpoint has no {where}")
    found = {**loaded, "params": _in_order(where, group, loaded)}
    if is_torchs and len(found["params"]) != len(group["params"]):
        raise CheckpointMismatch(
            f"{where} has {len(group['params'])} parameters, and {len(found['params'])} were saved"
        )
    found.pop(ADDED, None)
    for key, present in group.items():
        if key == "params":
            continue
        if key not in loaded:
            found[key] = present
            log.info("%s keeps %s = %r, which the checkpoint lacks", where, key, present)
        elif key == _NAMES:
            found[key] = present
        else:
            found[key] = _as_present(present, loaded[key])
    return found


def _as_present(present: Any, loaded: Any) -> Any:
    """A number that was saved as a tensor, such as a learning rate, or the other way round."""
    if isinstance(present, torch.Tensor):
        return torch.as_tensor(loaded, dtype=present.dtype, device=present.device)
    if isinstance(loaded, torch.Tensor) and isinstance(present, float | int):
        return loaded.item()
    return loaded


def _in_order(where: str, group: dict[str, Any], loaded: dict[str, Any]) -> Any:
    """The numbers of the saved parameters, in the present order."""
    now, saved = ([_inner(n) for n in each.get(_NAMES, ())] for each in (group, loaded))
    if not now or not saved or now == saved:
        return loaded["params"]
    if sorted(now) != sorted(saved):
        only_now, only_saved = sorted({*now} - {*saved}), sorted({*saved} - {*now})
        raise CheckpointMismatch(
            f"{where} has other parameters than were saved: {only_now[:10]} are new, and "
            f"{only_saved[:10]} are missing"
        )
    numbers = dict(zip(saved, loaded["params"], strict=True))
    return [numbers[name] for name in now]


def _inner(name: str) -> str:
    """The name of a parameter, whether or not the model is inside a DDP, or compiled."""
    return ".".join(part for part in plain_name(name).split(".") if part != "module")
