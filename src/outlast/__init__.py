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
    from outlast import async_checkpoint as async_checkpoint
    from outlast import chaos as chaos
    from outlast import elastic as elastic
    from outlast import errors as errors
    from outlast import events as events
    from outlast import inprocess as inprocess
    from outlast.async_checkpoint import Checkpointer as Checkpointer
    from outlast.async_checkpoint import Retention as Retention
    from outlast.async_checkpoint import SaveHandle as SaveHandle
    from outlast.elastic import ElasticLoader as ElasticLoader
    from outlast.elastic import Job as Job
    from outlast.elastic import ReplicaCheck as ReplicaCheck
    from outlast.elastic import ShardedStream as ShardedStream
    from outlast.elastic import StragglerCheck as StragglerCheck
    from outlast.elastic import per_rank as per_rank
    from outlast.inprocess import CallWrapper as CallWrapper
    from outlast.inprocess import Wrapper as Wrapper

    __version__: str

_PACKAGES = {
    "async_checkpoint": "Checkpointer Retention SaveHandle",
    "chaos": "",
    "elastic": "ElasticLoader Job ReplicaCheck ShardedStream StragglerCheck per_rank",
    "errors": "",
    "events": "",
    "inprocess": "CallWrapper Wrapper",
}
_PACKAGE_OF = {name: package for package, names in _PACKAGES.items() for name in names.split()}
globals()["__all__"] = sorted([*_PACKAGES, *_PACKAGE_OF])  # see `system.lazy_exports`


# Not by `system.lazy_exports`: on another system than Linux, only the packages cannot be imported.
def __getattr__(name: str) -> Any:
    if name in _PACKAGE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_PACKAGE_OF[name]}"), name)
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("outlast")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES, *_PACKAGE_OF, "__version__"})
