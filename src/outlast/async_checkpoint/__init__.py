"""Background saves: finalized once all ranks have finished, never if one has failed.

Modules are imported on first use: background processes import modules of this package, and most of
them do not need torch, whose import takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.system.lazy_exports import exports

if TYPE_CHECKING:
    from outlast.async_checkpoint.calls.caller import DistributedAsyncCaller
    from outlast.async_checkpoint.calls.queue import AsyncCallsQueue, AsyncRequest
    from outlast.async_checkpoint.checkpointer import Checkpointer
    from outlast.async_checkpoint.handle import SaveHandle
    from outlast.async_checkpoint.policies import FailurePolicy, Retention
    from outlast.async_checkpoint.storage.directory import CheckpointInfo

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
    "calls.caller": "DistributedAsyncCaller",
    "calls.queue": "AsyncCallsQueue AsyncRequest",
    "checkpointer": "Checkpointer",
    "handle": "SaveHandle",
    "policies": "FailurePolicy Retention",
    "storage.directory": "CheckpointInfo",
}

__getattr__, __dir__ = exports(__name__, _MODULES)
