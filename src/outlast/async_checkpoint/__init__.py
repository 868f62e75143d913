"""Background saves: finalized once all ranks have finished, never if one has failed.

Modules are imported on first use: background processes import modules of this package, and most of
them do not need torch, whose import takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.system.lazy_exports import exports

if TYPE_CHECKING:
    from outlast.async_checkpoint.calls.caller import (
        DistributedAsyncCaller as DistributedAsyncCaller,
    )
    from outlast.async_checkpoint.calls.queue import AsyncCallsQueue as AsyncCallsQueue
    from outlast.async_checkpoint.calls.queue import AsyncRequest as AsyncRequest
    from outlast.async_checkpoint.checkpointer import Checkpointer as Checkpointer
    from outlast.async_checkpoint.handle import SaveHandle as SaveHandle
    from outlast.async_checkpoint.policies import FailurePolicy as FailurePolicy
    from outlast.async_checkpoint.policies import Retention as Retention
    from outlast.async_checkpoint.storage.directory import CheckpointInfo as CheckpointInfo

_MODULES = {
    "calls.caller": "DistributedAsyncCaller",
    "calls.queue": "AsyncCallsQueue AsyncRequest",
    "checkpointer": "Checkpointer",
    "handle": "SaveHandle",
    "policies": "FailurePolicy Retention",
    "storage.directory": "CheckpointInfo",
}

__getattr__, __dir__ = exports(__name__, _MODULES)
