"""What a state was before something was loaded into it, to put it back where that fails."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["Backup"]


class Backup:
    """Of a nested state. What its tensors hold is copied, into the CPU's memory.

    Args:
        state: dicts, lists and tuples of tensors and values.
        unchanged: a part of it that nothing is loaded into: it is kept, and not copied.
    """

    def __init__(self, state: Any, unchanged: Any = None) -> None:
        self._unchanged = unchanged
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._state = self._noted(state)

    def put_back(self) -> Any:
        """Gives the tensors their content again; returns the state as it was."""
        with torch.no_grad():
            for tensor, content in self._tensors:
                tensor.copy_(content)
        return self._state

    def _noted(self, value: Any) -> Any:
        if value is self._unchanged:
            return value
        if isinstance(value, torch.Tensor):
            local = value.detach()
            if isinstance(local, DTensor):
                local = local.to_local()
            self._tensors.append((local, local.to("cpu", copy=True)))
            return value
        if isinstance(value, dict):
            noted = copy.copy(value)  # of its own kind
            for key, each in value.items():
                noted[key] = self._noted(each)
            return noted
        if isinstance(value, list):
            return [self._noted(each) for each in value]
        if type(value) is tuple:
            return tuple(self._noted(each) for each in value)
        return copy.deepcopy(value)
