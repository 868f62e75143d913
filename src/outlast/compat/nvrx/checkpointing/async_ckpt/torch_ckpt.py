"""`TorchAsyncCheckpoint`: `torch.save` in the background."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from outlast.compat.nvrx.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest

__all__ = ["TorchAsyncCheckpoint"]


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
        copied = tree_map(_on_cpu, state_dict)
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


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
