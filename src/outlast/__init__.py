"""Training jobs that outlast their faults.

`outlast.inprocess` restarts a function in place, `outlast.async_checkpoint` saves in the background
(`outlast.Checkpointer`), `outlast.elastic` brings state back at any size (`outlast.Job`),
`outlast run` keeps a job's survivors and replaces its dead, `outlast.chaos` injects faults,
`outlast.events` tells what happened.

Nothing is imported before it is asked for: the small processes that `outlast` starts beside a
training have no use for torch, whose import takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast import async_checkpoint, chaos, elastic, errors, events, inprocess
    from outlast.async_checkpoint import Checkpointer, Retention, SaveHandle
    from outlast.elastic import (
        ElasticLoader,
        Job,
        ReplicaCheck,
        ShardedStream,
        StragglerCheck,
        per_rank,
    )
    from outlast.inprocess import CallWrapper, Wrapper

    __version__: str

__all__ = [
    "CallWrapper",
    "Checkpointer",
    "ElasticLoader",
    "Job",
    "ReplicaCheck",
    "Retention",
    "SaveHandle",
    "ShardedStream",
    "StragglerCheck",
    "Wrapper",
    "async_checkpoint",
    "chaos",
    "elastic",
    "errors",
    "events",
    "inprocess",
    "per_rank",
]

_PACKAGES = {
    "CallWrapper": "inprocess",
    "Checkpointer": "async_checkpoint",
    "ElasticLoader": "elastic",
    "Job": "elastic",
    "ReplicaCheck": "elastic",
    "Retention": "async_checkpoint",
    "SaveHandle": "async_checkpoint",
    "ShardedStream": "elastic",
    "StragglerCheck": "elastic",
    "Wrapper": "inprocess",
    "per_rank": "elastic",
}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return getattr(importlib.import_module(f"{__name__}.{_PACKAGES[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("outlast")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
