"""A copy of a nested state, made before a load, to roll back to if the load fails."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class Backup:
    """Copies a nested state, including tensor contents, to CPU memory, except `not_copied`, a part
    to which the load does not write.
    """

    def __init__(self, state: Any, not_copied: Any = None) -> None:
        self._not_copied = not_copied
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._state = self._copy(state)

    def roll_back(self) -> Any:
        """Writes the copied contents back into the tensors; returns the state as it was."""
        with torch.no_grad():
            for tensor, contents in self._tensors:
                tensor.copy_(contents)
        return self._state

    def _copy(self, value: Any) -> Any:
        if value is self._not_copied:
            return value
        if isinstance(value, torch.Tensor):
            local = value.detach()
            if isinstance(local, DTensor):
                local = local.to_local()
            local = _each_once(local)
            self._tensors.append((local, local.to("cpu", copy=True)))
            return value
        if isinstance(value, dict):
            copied = copy.copy(value)  # keeps the dict's own class
            for key, each in value.items():
                copied[key] = self._copy(each)
            return copied
        if isinstance(value, list):
            return [self._copy(each) for each in value]
        if type(value) is tuple:
            return tuple(self._copy(each) for each in value)
        return copy.deepcopy(value)


def _each_once(tensor: torch.Tensor) -> torch.Tensor:
    """The part with every element in memory once: torch does not write to an expanded tensor."""
    if tensor.layout is torch.strided:
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.size(dim) > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor
