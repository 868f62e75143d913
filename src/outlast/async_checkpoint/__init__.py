"""Saves in the background: finalized once every rank has finished, never when one has failed.

Nothing is imported before it is asked for: the background processes import modules of this
package, and most of them have no use for torch, whose import takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.async_checkpoint.caller import DistributedAsyncCaller
    from outlast.async_checkpoint.checkpointer import Checkpointer
    from outlast.async_checkpoint.folder import CheckpointInfo
    from outlast.async_checkpoint.handle import SaveHandle
    from outlast.async_checkpoint.policy import FailurePolicy
    from outlast.async_checkpoint.queue import AsyncCallsQueue
    from outlast.async_checkpoint.request import AsyncRequest
    from outlast.async_checkpoint.retention import Retention

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "CheckpointInfo",
    "Checkpointer",
    "DistributedAsyncCaller",
    "FailurePolicy",
    "Retention",
    "SaveHandle",
]

_MODULES = {
    "AsyncCallsQueue": "queue",
    "AsyncRequest": "request",
    "CheckpointInfo": "folder",
    "Checkpointer": "checkpointer",
    "DistributedAsyncCaller": "caller",
    "FailurePolicy": "policy",
    "Retention": "retention",
    "SaveHandle": "handle",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # asked for once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
