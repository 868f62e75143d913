"""Training jobs that outlast their faults.

`outlast.inprocess` restarts a function in place, `outlast.async_checkpoint` saves in the background
(`outlast.Checkpointer`), `outlast.elastic` brings state back at any size (`outlast.Job`),
`outlast run` keeps a job's survivors and replaces its dead, `outlast.chaos` injects faults,
`outlast.events` tells what happened.

Nothing is imported before it is asked for: the small processes that `outlast` starts beside a
training have no use for torch, whose import takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outlast.lazy_exports import exports

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
    "async_checkpoint": "Checkpointer Retention SaveHandle async_checkpoint",
    "chaos": "chaos",
    "elastic": "ElasticLoader Job ReplicaCheck ShardedStream StragglerCheck elastic per_rank",
    "errors": "errors",
    "events": "events",
    "inprocess": "CallWrapper Wrapper inprocess",
}

_exported, _names = exports(__name__, _PACKAGES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("outlast")
    return _exported(name)


def __dir__() -> list[str]:
    return sorted({*_names(), "__version__"})
