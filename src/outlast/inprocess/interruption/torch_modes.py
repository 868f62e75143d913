"""Restores the modes of torch in the function's thread, which an interrupt may leave changed.

Gradient mode and autocast are flags of the thread. A context manager such as `torch.no_grad`
changes one and changes it back in `__exit__`, which is Python: an interrupt may be raised at its
first instruction, and then the flag stays as it was inside the block. Without this module the
function would be called again with gradients disabled, in that and every later iteration.
"""

from __future__ import annotations

import torch

_DEVICE_TYPES = ("cpu", "cuda")


class TorchModes:
    """The modes of the current thread, at the moment when this is created."""

    def __init__(self) -> None:
        self._gradients = torch.is_grad_enabled()
        self._autocast = {each: _autocast(each) for each in _DEVICE_TYPES}
        self._autocast_cache = torch.is_autocast_cache_enabled()

    def restore(self) -> None:
        """Sets the modes of the current thread to the recorded ones."""
        torch.set_grad_enabled(self._gradients)
        for device_type, (enabled, dtype) in self._autocast.items():
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(self._autocast_cache)
        torch.clear_autocast_cache()  # it holds casts of the parameters of the last iteration


def _autocast(device_type: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
